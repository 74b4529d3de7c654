"""How the selection service routes, as the router guide names it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.scheduling.queue import QueuePolicy
from kvd_core.selector_settings import Settings

# Selections that may wait in all, each a task of 5 KB and its prompt. Fleets hold some hundred.
MAX_HELD = 16_384

# As the router guide says.
DEFAULT_QUEUE_THRESHOLD = 2.0  # batches of prefill tokens
DEFAULT_TTL_S = 120.0
DEFAULT_MAX_TREE_SIZE = 2**20
DEFAULT_PRUNE_TARGET_RATIO = 0.8


@dataclass(slots=True)
class RouterOptions:
    """What the flags say. Its parts share one, so that a reload reaches all of them."""

    settings: Settings = field(
        default_factory=lambda: Settings(queue_threshold=DEFAULT_QUEUE_THRESHOLD)
    )
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    uses_kv_events: bool = True
    assumes_kv_reuse: bool = True  # else prompts given as tokens share no block in use
    ttl_s: float = DEFAULT_TTL_S  # of predicted blocks, where there are no events
    max_tree_size: int = DEFAULT_MAX_TREE_SIZE  # predicted blocks of a model and tenant
    prune_target_ratio: float = DEFAULT_PRUNE_TARGET_RATIO  # of these, once there are more
    max_held: int = MAX_HELD
    max_wait_s: float = 25.0  # below the deadline of handlers, so that the answer says why
