"""Options of the selection service's routing, named as in Dynamo's router guide."""

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
# Answers to bookings kept for retries, about 1 KB each. Beyond that the oldest are forgotten: their
# clients have long had them, and a retry is then refused like one without an Idempotency-Key.
MAX_RETRIES = 65_536

# Batches of prefill tokens beyond which a rank is busy, as the router guide says.
DEFAULT_QUEUE_THRESHOLD = 2.0
DEFAULT_TTL_S = 120.0  # life of a prediction where no events come, as the router guide says
DEFAULT_MAX_TREE_SIZE = 2**20  # predicted blocks of a model and tenant, as the router guide says
# Share of the predicted blocks kept when there are too many, as the router guide says.
DEFAULT_PRUNE_TARGET_RATIO = 0.8
# Behind the gateway a prompt counts as cached from the moment it is sent. Otherwise conversations
# that begin together with the same system prompt would have every engine compute it. This ends when
# its events arrive or after 5 s.
UNDER_WAY_S = 5.0
# A prompt under way counts on ranks with at most 1.177 (mean + 1) live requests, or one engine
# would get all conversations. Sessions have the same bound (kvd.selection.policies).
UNDER_WAY_BOUND = 1.177


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
        """Returns the mode that core settings have."""
        return next(mode for mode, core in _CORE.items() if core == settings.members["mode"])


_CORE = {
    RouterMode.KV: KV,
    RouterMode.ROUND_ROBIN: ROUND_ROBIN,
    RouterMode.RANDOM: RANDOM,
    RouterMode.LEAST_LOADED: LEAST_LOADED,
    RouterMode.DIRECT: DIRECT,
}

# Thresholds of load above which a rank gets no new work, as clients and the core's settings name
# them.
THRESHOLDS = (
    "active_decode_blocks_threshold",  # of its total_kv_blocks
    "active_prefill_tokens_threshold",  # tokens
    "active_prefill_tokens_threshold_frac",  # of its max_num_batched_tokens
)


@dataclass(slots=True)
class RouterOptions:
    """The settings of the service, in one object that all parts share: reloads reach them all."""

    settings: Settings = field(
        default_factory=lambda: Settings(queue_threshold=DEFAULT_QUEUE_THRESHOLD)
    )
    queue_policy: QueuePolicy = QueuePolicy.FCFS
    uses_kv_events: bool = True
    assumes_kv_reuse: bool = True  # False: no two prompts given as tokens share a block in use
    ttl_s: float = DEFAULT_TTL_S  # life of predicted blocks on workers without events
    max_tree_size: int = DEFAULT_MAX_TREE_SIZE  # predicted blocks of a model and tenant
    prune_target_ratio: float = DEFAULT_PRUNE_TARGET_RATIO  # share of them kept when it is exceeded
    predicted_ttl_s: float | None = None  # life of predictions beside events; None: no such ones
    # Predicted blocks count on ranks with at most `predicted_bound` (mean + 1) live requests.
    predicted_bound: float = math.inf
    tracks_output_blocks: bool = False  # output blocks weigh less towards the request's end
    session_affinity_ttl_s: int | None = None  # None: no session is bound
    disconnected_s: float | None = DEFAULT_DISCONNECTED_S  # None: lost connections change nothing
    unconnected_s: float | None = None  # the same for connections that were never made
    prefill_busy: float | None = None  # batches; None: advisory answers omit `prefill_busy`
    max_held: int = MAX_WAITING
    max_wait_s: float = DEFAULT_MAX_WAIT_S
    max_partitions: int = MAX_PARTITIONS
    max_sessions: int = MAX_SESSIONS
    max_retries: int = MAX_RETRIES
