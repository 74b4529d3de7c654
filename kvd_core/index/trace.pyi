from typing import Final, NamedTuple

from kvd_core.index.prefix_index import PrefixIndex, Worker
from kvd_core.json.scan import BodyScanner

END_REASONS: Final[tuple[str, ...]]
KINDS: Final[tuple[str, ...]]

class End(NamedTuple):
    depth: int
    why: str
    at: float | None
    tier: int

class Traced(NamedTuple):
    tiers: list[End]
    all: End

class Happened(NamedTuple):
    at: float
    kind: str
    worker_id: int | str
    dp_rank: int
    tiers: int
    begin: int
    end: int

def terms(lora_name: str | None, cache_salt: str | None) -> tuple[int, int]: ...
def hashed(
    scanner: BodyScanner,
    array: int,
    block_size: int,
    adapter: int,
    salt: int,
    *,
    eagle: bool = False,
) -> bytes: ...
def given(scanner: BodyScanner, array: int) -> bytes: ...
def recalled(index: PrefixIndex, sequence_hashes: bytes) -> bytes: ...
def seeds(index: PrefixIndex) -> list[tuple[int, int]]: ...

class Trace:
    def __init__(
        self, index: PrefixIndex, plain: bytes, salted: bytes | None, most_steps: int
    ) -> None: ...
    def add(self, worker: Worker, dp_rank: int) -> None: ...
    def advance(self, changes: int) -> bool: ...
    def rows(self) -> dict[tuple[int | str, int], Traced]: ...
    def happened(self) -> list[Happened]: ...
    @property
    def left_out(self) -> int: ...
