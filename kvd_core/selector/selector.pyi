from collections.abc import Iterable
from typing import Final, NamedTuple

from kvd_core.index.predictions import Predictions
from kvd_core.index.prefix_index import PrefixIndex, Worker
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.settings import Settings

NONE: Final[int]
BUSY: Final[int]
OVERLOADED: Final[int]

MAX_ISL_TOKENS: Final[int]

class Candidate(NamedTuple):
    worker_id: int
    dp_rank: int
    worker: Worker | None
    ledger_rank: int
    max_num_batched_tokens: int = ...
    total_kv_blocks: int | None = ...
    ranks: int = ...

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
    decoding_requests: int
    cached_tokens: int
    effective_prefill_tokens: int
    potential_decode_blocks: int
    raw_prefill_blocks: float
    credit_blocks: float
    prefill_cost: float
    decode_cost: float
    counted_tokens: float
    uncached_cost: float
    hold_up_cost: float
    crowding_cost: float
    queued_cost: float
    request_cost: float
    block_cost: float
    product_cost: float
    cost: float
    keeps_sessions: bool
    eligible: bool
    overloaded: bool
    busy: bool
    preference: float
    heard: bool
    reachable: bool

class Chance(NamedTuple):
    position: int
    weight: float | None
    chance: float

class Prompt:
    def render(self) -> bytes: ...
    @property
    def isl_tokens(self) -> int: ...
    @property
    def local_hashes(self) -> bytes: ...
    @property
    def sequence_hashes(self) -> bytes: ...
    @property
    def bytes(self) -> int: ...

class Pool:
    def __init__(
        self,
        index: PrefixIndex | None,
        ledger: Ledger,
        block_size: int,
        candidates: Iterable[Candidate] = ...,
        predictions: Predictions | None = ...,
        predicted_bound: float = ...,
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    def match(self, local_hashes: bytes, sequence_hashes: bytes, isl_tokens: int) -> None: ...
    def match_tokens(
        self,
        scanner: BodyScanner,
        array: int,
        lora_name: str | None = None,
        cache_salt: str | None = None,
        unique: int | None = None,
        *,
        eagle: bool = False,
    ) -> None: ...
    def match_again(self, prompt: Prompt) -> None: ...
    def hold(self) -> Prompt: ...
    def is_like(self, other: Pool) -> bool: ...
    def candidate(self, position: int) -> Candidate: ...
    @property
    def candidates(self) -> tuple[Candidate, ...]: ...
    def renewed(self, changes: dict[int, list[Candidate]]) -> Pool: ...
    def take_turns(self, former: Pool) -> None: ...
    def choose(
        self,
        settings: Settings,
        eligible: bytes | None,
        random: int,
        factors: bytes | None = None,
    ) -> int: ...
    def chances(
        self, settings: Settings, eligible: bytes | None, factors: bytes | None = None
    ) -> list[Chance] | int: ...
    def exceeded(self, candidate: int, settings: Settings) -> list[str]: ...
    def refusal(self, settings: Settings, eligible: bytes | None) -> int: ...
    def stay(self, settings: Settings, eligible: bytes | None, wanted: bytes) -> bytes | None: ...
    def best(self, settings: Settings, eligible: bytes | None) -> int: ...
    def least_prefill_tokens(self, settings: Settings, eligible: bytes | None) -> int: ...
    def set_heard(self, candidate: int, heard: bool) -> None: ...
    def set_reachable(self, candidate: int, reachable: bool) -> None: ...
    def deepest(self, limit: int) -> list[tuple[int, int, int]]: ...
    def mask(self, worker_ids: Iterable[int], dp_rank: int | None = None) -> bytes: ...
    def remember(self) -> None: ...
    def changed(self) -> bytes | None: ...
    def find(self, worker_id: int, dp_rank: int) -> int | None: ...
    def effective_prefill_tokens(self, candidate: int, settings: Settings) -> int: ...
    def reserve(
        self,
        request_id: str,
        candidate: int,
        tokens: int,
        now: float,
        key: str | None = None,
        expected_output: int | None = None,
        *,
        blocks: bool = True,
    ) -> int: ...
    def predict(self, candidate: int, now: float) -> None: ...
    def withdraw(self, candidate: int, then: float) -> None: ...
    def explain(
        self, settings: Settings, eligible: bytes | None = None, factors: bytes | None = None
    ) -> list[Explained]: ...
    def explained(
        self,
        candidate: int,
        settings: Settings,
        eligible: bytes | None = None,
        factors: bytes | None = None,
    ) -> Explained: ...
    # For tests and the bench, like `render_overlaps`: handlers render whole answers.
    def render_choice(self, candidate: int, settings: Settings) -> bytes: ...
    def render_answer(
        self, opening: bytes, members: bytes, candidate: int, settings: Settings
    ) -> bytes: ...
    def render_overlaps(self) -> bytes: ...
    def render_loads(self, settings: Settings) -> bytes: ...
    def keep_overlaps(self) -> KeptStates: ...
    def keep_loads(self, settings: Settings) -> KeptStates: ...

class KeptStates:
    def read(self, enough: int) -> bytes: ...
