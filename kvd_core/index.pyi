from collections.abc import Iterable, Sequence
from typing import Final, TypedDict

from kvd_core.scan import BodyScanner

TIERS: Final[tuple[str, ...]]
MAX_BLOCKS: Final[int]
EMPTIED: Final[int]
FLAWED: Final[int]
IGNORED: Final[tuple[str, ...]]

class IngestTotals(TypedDict):
    batches: int
    stored: int
    removed: int
    cleared: int
    ignored: dict[str, int]
    bad: dict[str, int]

class IndexStats(TypedDict):
    blocks: int
    chains: int
    bytes: int
    held: dict[str, int]
    parked_now: int
    records: int
    exceptions: int
    stored: int
    refreshed: int
    copies: int
    rebound: int
    removed: int
    removed_copies: int
    removed_unknown: int
    parked: int
    unparked: int
    parked_dropped: int
    parked_unsalted: int
    self_references: int

class IngestCounters:
    def as_dict(self) -> IngestTotals: ...

class PrefixIndex:
    counters: Final[IngestCounters]
    def __init__(
        self, block_size: int, counters: IngestCounters, max_blocks: int = ...
    ) -> None: ...
    @property
    def block_size(self) -> int: ...
    def add_worker(self, worker_id: int | str) -> Worker: ...
    def sweep(self, max_steps: int) -> bool: ...
    def query_tokens(
        self,
        scanner: BodyScanner,
        array: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> bytes: ...
    def query_hashes(self, scanner: BodyScanner, array: int) -> bytes: ...
    def match(
        self, locals: Sequence[int]
    ) -> tuple[dict[tuple[int | str, int], tuple[int, int, int]], list[int]]: ...
    def dump(self, binary: bool = False) -> Dump: ...
    def stats(self) -> IndexStats: ...
    def verify(self) -> None: ...

class Worker:
    worker_id: Final[int | str]
    def register(self, dp_rank: int) -> None: ...
    def unregister(self, dp_rank: int) -> None: ...
    def ranks(self) -> list[int]: ...
    def settled(self) -> None: ...
    def remove(self) -> None: ...
    def stream(self, dp_rank: int) -> Stream: ...
    def store(
        self,
        dp_rank: int,
        names: Sequence[int],
        locals: Sequence[int],
        parent: int | None = None,
        tier: int = 0,
    ) -> bool: ...
    def store_named(
        self, dp_rank: int, names: Sequence[int], tier: int, offload: bool = True
    ) -> bool: ...
    def drop(self, dp_rank: int, names: Iterable[int], tier: int = 0) -> None: ...
    def clear(self, dp_rank: int, tier: int | None = None) -> None: ...

class Stream:
    def apply(self, payload: bytes) -> int: ...
    def flaw(self) -> str: ...
    def clear(self) -> None: ...
    def restored(self) -> bool: ...
    def goes_on(self, payload: bytes) -> bool: ...
    def drop_restored(self) -> bool: ...

class Dump:
    @property
    def blocks(self) -> int: ...
    def read(self, enough: int) -> bytes: ...
