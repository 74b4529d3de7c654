"""Options of the selection service's routing, named as in the router guide."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from kvd.model import MAX_PARTITIONS
from kvd.platform.descriptors import MAX_WAITING
from kvd.selection.queue import QueuePolicy
from kvd.selection.sessions import MAX_SESSIONS
from kvd_core.selector.settings import DIRECT, KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings

# Time for which an engine is still chosen after its event connection was lost: a network that has
# dropped the connection is back within a second or two.
DEFAULT_DISCONNECTED_S = 3.0
# Longest wait of a selection: below the deadline of handlers, so that the answer names the reason.
DEFAULT_MAX_WAIT_S = 25.0
# Answers to bookings that can be had again, about 1 KB each. Bookings whose answer is forgotten
# refuse their retries as those without a key do; the oldest go first, whose clients have long had
# their answers.
MAX_RETRIES = 65_536

# Batches of prefill tokens beyond which a rank is busy, as the router guide says.
DEFAULT_QUEUE_THRESHOLD = 2.0
DEFAULT_TTL_S = 120.0  # life of a prediction where no events come, as the router guide says
DEFAULT_MAX_TREE_SIZE = 2**20  # predicted blocks of a model and tenant, as the router guide says
# Share of the predicted blocks kept when there are too many, as the router guide says.
DEFAULT_PRUNE_TARGET_RATIO = 0.8
# Behind the gateway a prompt counts as cached from when it is sent: conversations that begin
# together with the same system prompt would else have it computed on every engine. That ends with
# its events or after 5 s, and counts only where there are not many more requests than elsewhere, or
# one engine would get all of them.
UNDER_WAY_S = 5.0
UNDER_WAY_BOUND = 1.177  # times the mean requests plus 1, as for sessions (kvd.selection.policies)


class RouterMode(StrEnum):
    """The mode by which a worker is chosen among those that may serve a request."""

    KV = "kv"  # the lowest cost
    ROUND_ROBIN = "round-robin"  # each in turn
    RANDOM = "random"
    LEAST_LOADED = "least-loaded"  # the fewest requests
    DIRECT = "direct"  # the worker that the request names

    @property
    def core(self) -> int:
        """The mode of the core's settings."""
        return _CORE[self]

    @classmethod
    def of(cls, settings: Settings) -> RouterMode:
        """Returns the mode of some settings."""
        return next(mode for mode, core in _CORE.items() if core == settings.members["mode"])


_CORE = {
    RouterMode.KV: KV,
    RouterMode.ROUND_ROBIN: ROUND_ROBIN,
    RouterMode.RANDOM: RANDOM,
    RouterMode.LEAST_LOADED: LEAST_LOADED,
    RouterMode.DIRECT: DIRECT,
}

# When a rank gets no new work, by the names that clients and the core's settings have for that.
THRESHOLDS = (
    "active_decode_blocks_threshold",  # of its total_kv_blocks
    "active_prefill_tokens_threshold",  # tokens
    "active_prefill_tokens_threshold_frac",  # of its max_num_batched_tokens
)


@dataclass(slots=True)
class RouterOptions:
    """The settings of the service. All parts share one object, so a reload reaches all of them."""

    settings: Settings = field(
        default_factory=lambda: Settings(queue_threshold=DEFAULT_QUEUE_THRESHOLD)
    )
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    uses_kv_events: bool = True
    assumes_kv_reuse: bool = True  # else prompts given as tokens share no block in use
    ttl_s: float = DEFAULT_TTL_S  # of predicted blocks, where there are no events
    max_tree_size: int = DEFAULT_MAX_TREE_SIZE  # predicted blocks of a model and tenant
    prune_target_ratio: float = DEFAULT_PRUNE_TARGET_RATIO  # of these, once there are more
    predicted_ttl_s: float | None = None  # of predicted blocks beside events; None: there are none
    # Predicted blocks count on ranks with at most so many times the mean requests plus 1.
    predicted_bound: float = math.inf
    tracks_output_blocks: bool = False  # they weigh less towards the expected end of a request
    session_affinity_ttl_s: int | None = None  # None: sessions are bound nowhere
    disconnected_s: float | None = DEFAULT_DISCONNECTED_S  # None: lost connections change nothing
    unconnected_s: float | None = None  # the same of those that were never made
    prefill_busy: float | None = None  # batches; None: advisory answers omit it
    max_held: int = MAX_WAITING
    max_wait_s: float = DEFAULT_MAX_WAIT_S
    max_partitions: int = MAX_PARTITIONS
    max_sessions: int = MAX_SESSIONS
    max_retries: int = MAX_RETRIES
