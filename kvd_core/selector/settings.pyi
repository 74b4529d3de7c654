from collections.abc import Mapping
from typing import Final

KV: Final[int]
ROUND_ROBIN: Final[int]
RANDOM: Final[int]
LEAST_LOADED: Final[int]
DIRECT: Final[int]
MODES: Final[tuple[int, ...]]
LINES: Final[range]

MAX_WEIGHT: Final[float]

class Settings:
    def __init__(
        self,
        *,
        mode: int = ...,
        line: int = ...,
        overlap_weight: float = ...,
        device_credit: float = ...,
        host_credit: float = ...,
        disk_credit: float = ...,
        credit_decay: float = ...,
        active_request_weight: float = ...,
        policy: str = ...,
        weighted: bool = ...,
        uncached: float = ...,
        hold_up: float = ...,
        crowding: float = ...,
        crowding_limit: float | None = ...,
        queued: float = ...,
        per_request: float = ...,
        per_block: float = ...,
        product: float = ...,
        saturation: float | None = ...,
        session_bound: float | None = ...,
        temperature: float = ...,
        track_prefill: bool = ...,
        track_active_blocks: bool = ...,
        last_token: bool = ...,
        queue_threshold: float | None = ...,
        active_decode_blocks_threshold: float | None = ...,
        active_prefill_tokens_threshold: float | None = ...,
        active_prefill_tokens_threshold_frac: float | None = ...,
        decode_busy_threshold: float | None = ...,
    ) -> None: ...
    members: Final[Mapping[str, float | None]]
    def replace(self, **changes: float | None) -> Settings: ...
