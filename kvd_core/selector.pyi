from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from kvd_core.index import PrefixIndex, Worker
from kvd_core.ledger import Ledger
from kvd_core.scan import BodyScanner

KV: Final[int]
ROUND_ROBIN: Final[int]
RANDOM: Final[int]
LEAST_LOADED: Final[int]
MODES: Final[tuple[int, ...]]

NONE: Final[int]
BUSY: Final[int]
OVERLOADED: Final[int]

MAX_ISL_TOKENS: Final[int]
MAX_WEIGHT: Final[float]

class Candidate(NamedTuple):
    worker_id: int
    dp_rank: int
    worker: Worker | None
    ledger_rank: int
    max_num_batched_tokens: int = ...
    total_kv_blocks: int = ...

class Explained(NamedTuple):
    worker_id: int
    dp_rank: int
    device_blocks: int
    host_blocks: int
    disk_blocks: int
    live_blocks: int
    active_prefill_tokens: int
    active_decode_blocks: int
    active_requests: int
    cached_tokens: int
    effective_prefill_tokens: int
    potential_decode_blocks: int
    raw_prefill_blocks: float
    credit_blocks: float
    prefill_cost: float
    decode_cost: float
    cost: float
    eligible: bool
    overloaded: bool
    busy: bool

class Settings:
    def __init__(
        self,
        *,
        mode: int = ...,
        overlap_weight: float = ...,
        device_credit: float = ...,
        host_credit: float = ...,
        disk_credit: float = ...,
        temperature: float = ...,
        track_prefill: bool = ...,
        track_active_blocks: bool = ...,
        queue_threshold: float | None = ...,
        active_decode_blocks_threshold: float | None = ...,
        active_prefill_tokens_threshold: float | None = ...,
        active_prefill_tokens_threshold_frac: float | None = ...,
    ) -> None: ...
    members: Final[Mapping[str, float | None]]
    def replace(self, **changes: float | None) -> Settings: ...

class Prompt:
    @property
    def isl_tokens(self) -> int: ...
    @property
    def local_hashes(self) -> bytes: ...
    @property
    def sequence_hashes(self) -> bytes: ...
    @property
    def bytes(self) -> int: ...

class Pool:
    candidates: Final[tuple[Candidate, ...]]
    def __init__(
        self,
        index: PrefixIndex | None,
        ledger: Ledger,
        block_size: int,
        candidates: Iterable[Candidate] = ...,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    def look(self, local_hashes: bytes, sequence_hashes: bytes, isl_tokens: int) -> None: ...
    def look_body(
        self, scanner: BodyScanner, local_hashes: int, sequence_hashes: int, isl_tokens: int
    ) -> None: ...
    def look_tokens(
        self,
        scanner: BodyScanner,
        array: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        unique: int | None = None,
    ) -> None: ...
    def look_again(self, prompt: Prompt) -> None: ...
    def hold(self) -> Prompt: ...
    def choose(self, settings: Settings, eligible: bytes | None, random: int) -> int: ...
    def mask(self, worker_ids: Iterable[int]) -> bytes: ...
    def find(self, worker_id: int, dp_rank: int) -> int | None: ...
    def effective_prefill_tokens(self, candidate: int, settings: Settings) -> int: ...
    def book(
        self, request_id: str, candidate: int, tokens: int, now: float, key: str | None = None
    ) -> int: ...
    def explain(self, settings: Settings, eligible: bytes | None = None) -> list[Explained]: ...
    def explained(
        self, candidate: int, settings: Settings, eligible: bool = True
    ) -> Explained: ...
    def render_choice(self, candidate: int, settings: Settings) -> bytes: ...
    def render_overlaps(self) -> bytes: ...
    def render_loads(self, settings: Settings) -> bytes: ...
