# distutils: language = c++
"""Settings of the costs and of the choice; `selector/cost.pxd` explains the figures."""

from types import MappingProxyType

from libc.math cimport INFINITY

KV = <int>kKv
ROUND_ROBIN = <int>kRoundRobin
RANDOM = <int>kRandom
LEAST_LOADED = <int>kLeastLoaded
DIRECT = <int>kDirect
MODES = (KV, ROUND_ROBIN, RANDOM, LEAST_LOADED, DIRECT)
LINES = range(kLines)

# Weights up to here leave every cost finite: 2^63 tokens times 1e18 is far below 1e308.
MAX_WEIGHT = 1e18

# The settings: their defaults, and the highest values of some.
cdef dict DEFAULTS = {
    "mode": KV,
    "line": 0,
    "overlap_weight": 1.0,
    "device_credit": 1.0,
    "host_credit": 0.75,
    "disk_credit": 0.25,
    "credit_decay": 0.0,
    "active_request_weight": 0.0,
    "policy": "dynamo",
    "weighted": False,
    "uncached": 1.0,
    "hold_up": 0.0,
    "crowding": 0.0,
    "crowding_limit": None,
    "queued": 0.0,
    "per_request": 0.0,
    "per_block": 0.0,
    "product": 0.0,
    "saturation": None,
    "session_bound": None,
    "temperature": 0.0,
    "track_prefill": True,
    "track_active_blocks": True,
    "last_token": False,
    "queue_threshold": None,
    "active_decode_blocks_threshold": None,
    "active_prefill_tokens_threshold": None,
    "active_prefill_tokens_threshold_frac": None,
    "decode_busy_threshold": None,
}
cdef dict HIGHEST = {"host_credit": 1.0, "disk_credit": 1.0}


cdef class Settings:
    """Settings of a choice: immutable, made once for each configuration or override."""

    def __init__(self, **members):
        """Takes weights and thresholds from 0 to MAX_WEIGHT; a threshold of None is off.

        `weighted` selects the weighted cost, with the weights from `uncached` to `product` and the
        tokens of `saturation`; else the cost is Dynamo's, with the weights before these. `policy`
        is the caller's name for that. A session stays with a rank that has at most `session_bound`
        times the mean requests plus 1 (see Pool.stay). `temperature` 0 takes the lowest cost.

        `track_prefill` and `track_active_blocks` say which terms the cost has; `last_token` says
        that the last token's block is computed even if it is cached. A rank is busy above
        `queue_threshold` times its max_num_batched_tokens. The other thresholds take a rank out:
        `active_decode_blocks` of its total_kv_blocks, prefill tokens, and these as a fraction of
        its max_num_batched_tokens. Above `decode_busy_threshold` of its total_kv_blocks, answers
        call a rank `decode_busy`. ROUND_ROBIN takes the turns of one of LINES.

        ValueError for a value out of range; TypeError for an unknown name.
        """
        if not members.keys() <= DEFAULTS.keys():
            raise TypeError(f"not among the settings: {members.keys() - DEFAULTS.keys()}")
        self.members = MappingProxyType({**DEFAULTS, **members})
        if self.members["mode"] not in MODES:
            raise ValueError(f"no such mode: {self.members['mode']}")
        if self.members["line"] not in LINES:
            raise ValueError(f"no such line of turns: {self.members['line']}")
        self.c.line = self.members["line"]
        self.c.mode = <CMode><int>self.members["mode"]
        self.c.overlap_weight = self.number("overlap_weight")
        self.c.device_credit = self.number("device_credit")
        self.c.host_credit = self.number("host_credit")
        self.c.disk_credit = self.number("disk_credit")
        self.c.credit_decay = self.number("credit_decay")
        self.c.active_request_weight = self.number("active_request_weight")
        self.c.weighted = self.members["weighted"]
        self.c.uncached = self.number("uncached")
        self.c.hold_up = self.number("hold_up")
        self.c.crowding = self.number("crowding")
        self.c.crowding_limit = self.threshold("crowding_limit")
        self.c.queued = self.number("queued")
        self.c.per_request = self.number("per_request")
        self.c.per_block = self.number("per_block")
        self.c.product = self.number("product")
        self.c.saturation = self.threshold("saturation")
        self.c.session_bound = self.threshold("session_bound")
        self.c.temperature = self.number("temperature")
        self.c.track_prefill = self.members["track_prefill"]
        self.c.track_active_blocks = self.members["track_active_blocks"]
        self.c.last_token = self.members["last_token"]
        self.c.queue_threshold = self.threshold("queue_threshold")
        self.c.decode_blocks_threshold = self.threshold("active_decode_blocks_threshold")
        self.c.prefill_tokens_threshold = self.threshold("active_prefill_tokens_threshold")
        self.c.prefill_tokens_threshold_frac = self.threshold(
            "active_prefill_tokens_threshold_frac"
        )
        self.c.decode_busy_threshold = self.threshold("decode_busy_threshold")

    def replace(self, **changes):
        """Returns the same settings with `changes`, by the names of the constructor."""
        return Settings(**{**self.members, **changes})

    cdef double number(self, str name) except *:
        cdef double value = self.members[name], highest = HIGHEST.get(name, MAX_WEIGHT)
        if not 0 <= value <= highest:
            raise ValueError(f"{name} must lie in [0, {highest:g}]")
        return value

    cdef double threshold(self, str name) except *:
        return INFINITY if self.members[name] is None else self.number(name)
