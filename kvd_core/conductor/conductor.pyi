from collections.abc import Iterable, Sequence
from typing import Any

from kvd_core.index.prefix_index import PrefixIndex, Slice, Worker
from kvd_core.json.scan import BodyScanner

DEFAULT_SEED: int
OUTCOMES: tuple[str, ...]

def namespace(lora_name: str, cache_salt: str) -> int: ...

class Conductor:
    index: PrefixIndex
    def __init__(self, index: PrefixIndex, seed: int = ...) -> None: ...
    def add_source(
        self, instance_id: str, lora_name: str, cache_salt: str, dp_rank: int, store: bool
    ) -> Source: ...
    def has(self, instance_id: str) -> bool: ...
    def instances(self) -> list[str]: ...
    def sequence(self, max_steps: int) -> bool: ...
    def link(self, instance_id: str, worker: Worker | None) -> None: ...
    def query_tokens(
        self,
        scanner: BodyScanner,
        array: int,
        lora_name: str,
        cache_salt: str,
        tenant: str,
        instance: str,
    ) -> bytes: ...
    def query_hashes(
        self,
        scanner: BodyScanner,
        array: int,
        lora_name: str,
        cache_salt: str,
        tenant: str,
        instance: str,
    ) -> bytes: ...
    def tiers_of_tokens(
        self, tokens: bytes, lora_name: str, cache_salt: str, instance: str
    ) -> list[tuple[str, list[tuple[int, int, int, int, int]]]]: ...
    def tiers_of_hashes(
        self, hashes: bytes, lora_name: str, cache_salt: str, instance: str
    ) -> list[tuple[str, list[tuple[int, int, int, int, int]]]]: ...
    # For tests.
    def match_tokens(
        self, tokens: Iterable[int], lora_name: str = "", cache_salt: str = "", instance: str = ""
    ) -> dict[str, dict[str, Any]]: ...
    def match_hashes(
        self, hashes: Iterable[int], lora_name: str = "", cache_salt: str = "", instance: str = ""
    ) -> dict[str, dict[str, Any]]: ...
    def stats(self) -> dict[str, int]: ...
    def verify(self) -> None: ...

class Source:
    instance_id: str
    def store(
        self,
        backend: int,
        rank: int | None,
        medium: str,
        hashes: Sequence[int],
        tokens: Sequence[int],
        parent: int | None,
        space: int,
        inherits: bool = False,
        by_engine: bool = False,
        objects: Sequence[Sequence[int]] | None = None,
        whole: bool = True,
    ) -> str: ...
    def store_named(
        self,
        backend: int,
        rank: int | None,
        medium: str,
        hashes: Sequence[int],
        space: int,
        by_engine: bool = False,
        whole: bool = True,
    ) -> str: ...
    def resolve_waiting(self, slice: Slice) -> bool: ...
    def remove(
        self,
        backend: int,
        rank: int | None,
        medium: str | None,
        hashes: Sequence[int],
        space: int,
        by_engine: bool = False,
    ) -> None: ...
    def clear(
        self, backend: int, rank: int | None, medium: str | None = None, space: int | None = None
    ) -> None: ...
    def engine_events(self, lora_name: str, cache_salt: str) -> EngineEvents: ...
    def settled(self) -> None: ...
    def drop_idle(self) -> None: ...
    def holders(self) -> list[tuple[int, int | None]]: ...
    def stats(self) -> dict[str, int]: ...
    def remove_all(self) -> None: ...

class EngineEvents:
    slice_steps: int
    def apply(self, payload: bytes) -> bool | None: ...
    def advance(self) -> bool | None: ...
    def flaw(self) -> str: ...
    def full(self) -> int: ...
    def forget(self) -> None: ...
    def stats(self) -> dict[str, Any]: ...
