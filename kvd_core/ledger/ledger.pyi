from collections.abc import Callable, Iterable
from typing import Final, NamedTuple, TypedDict, type_check_only

from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.journal import Journal

MAX_REQUESTS: Final[int]
MAX_BLOCKS: Final[int]
MAX_RANKS: Final[int]
MAX_TOKENS: Final[int]
MAX_REQUEST_ID_BYTES: Final[int]
WHOLE_ROWS_BYTES: Final[int]

ADDED: Final[int]
REPEATED: Final[int]
EXISTS: Final[int]
FULL: Final[int]
OVERFLOW: Final[int]

class LiveRequest(NamedTuple):
    worker_id: int
    dp_rank: int
    blocks: int
    prefill_tokens: int
    tokens: int
    prefill_complete: bool
    admitted_at: float
    output_blocks: int
    expected_output_tokens: int | None

class Load(NamedTuple):
    prefill_tokens: int
    decode_blocks: int
    requests: int

@type_check_only
class LedgerStats(TypedDict):
    requests: int
    blocks: int
    nodes: int
    rank_refs: int
    ranks: int
    output_blocks: int
    bytes: int
    added: int
    repeated: int
    freed: int
    expired: int
    removed: int
    refused: dict[str, int]

class Loads:
    @property
    def eased(self) -> Callable[[], None] | None: ...
    def on_eased(self, eased: Callable[[], None] | None) -> None: ...

class Ledger:
    loads: Final[Loads]
    def __init__(
        self,
        max_requests: int = ...,
        max_blocks: int = ...,
        max_output_blocks: int = ...,
        loads: Loads | None = None,
    ) -> None: ...
    def add_rank(self, worker_id: int, dp_rank: int) -> int: ...
    def add_ranks(self, worker_id: int, first: int, count: int) -> None: ...
    def remove_ranks(
        self, worker_id: int, dp_ranks: Iterable[int], limit: int = ...
    ) -> list[tuple[str, int]]: ...
    def rank_of(self, worker_id: int, dp_rank: int) -> int | None: ...
    def add(
        self,
        request_id: str,
        rank: int,
        hashes: BodyScanner | bytes,
        tokens: int,
        now: float,
        key: str | None = None,
        expected_output: int | None = None,
    ) -> int: ...
    def prefill_complete(self, request_id: str) -> bool: ...
    def free(self, request_id: str) -> bool: ...
    def output_block(
        self, request_id: str, fraction: float | None = None, count: int = 1
    ) -> bool: ...
    def expire(self, before: float, limit: int) -> list[str]: ...
    def oldest(self) -> float | None: ...
    def request(self, request_id: str) -> LiveRequest | None: ...
    def hashes(self, request_id: str) -> bytes | None: ...
    def load(self, rank: int) -> Load: ...
    def render_loads(self, prefix: bytes = b"") -> bytes: ...
    def project(self, hashes: BodyScanner | bytes, new_tokens: int) -> bytes: ...
    def rows_bytes(self, prefix: int = 0) -> int: ...
    def keep_loads(self, prefix: bytes = b"") -> KeptRows: ...
    def keep_projection(self, hashes: BodyScanner | bytes, new_tokens: int) -> KeptRows: ...
    def depths(self, hashes: BodyScanner | bytes) -> dict[int, int]: ...
    def record_in(self, number: int, *journals: Journal) -> None: ...
    @property
    def number(self) -> int: ...
    def export(self, journal: Journal, after: int, enough: int) -> int | None: ...
    def stats(self) -> LedgerStats: ...
    def verify(self) -> None: ...

class KeptRows:
    def read(self, enough: int) -> bytes: ...
