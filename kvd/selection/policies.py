"""The router's policies: costs by name, each a row of weights of the core's settings.

`dynamo` is Dynamo's function with the weights that operators and requests give it. The others are
rows of the weighted cost, in tokens (kvd_core/selector/cost.pxd):

    cost = uncached n (1 + hold_up D) + queued P + per_request A + per_block U
           + product max(1, P + n) (A + 1)

with n tokens of the prompt to compute on the rank, P tokens being prefilled there, D requests that
decode, A live ones, U tokens of the blocks in use; n counts at most `saturation` more than for
whoever has fewest.

    policy        uncached  hold_up  queued  per_request  product  saturation  source
    kvd           1         0.1      1       0            0        off         [1]
    lmetric       0         0        0       0            1        off         [2]
    ramjet        1         0        0.25    2048         0        16384       [3], its defaults
    ramjet-tuned  1         0        0.0993  452.1        0        34816       [3], as tuned there

[1] our replays of recorded requests (docs/policies.md). [2] LMetric, arXiv 2603.15202: its
(P + n) (A + 1) as published. [3] ai-dynamo/dynamo, branch rupei/learned-routing-public.

Ramjet chooses the highest min(W, cap) - min(W - O, cap) - a (A + P / u) with the overlap O of a
rank and the deepest W in units of 512 tokens. W is the same for all, so that is the lowest
min(512 (W - O), 512 cap) + 512 a A + (512 a / u) P in tokens: saturation 512 cap, per_request
512 a and queued 512 a / u, with a 4, cap 32, u 8192, and tuned 0.883, 68, 4552. It counts whole
units of the device; here tokens count, and blocks of lower tiers as everywhere.

No row weighs blocks in use: where prompts are long they only tell how much a rank caches of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kvd_core.selector.settings import Settings

# The settings that a policy is a row of: which cost, then weights of the weighted one.
WEIGHTS = (
    "uncached",
    "hold_up",
    "queued",
    "per_request",
    "per_block",
    "product",
    "saturation",
)
ROW = ("weighted", *WEIGHTS)

# Those of Dynamo's function.
DYNAMO_WEIGHTS = ("overlap_weight", "device_credit", "credit_decay", "active_request_weight")


class RouterPolicy(StrEnum):
    """What a rank costs in mode `kv`."""

    DYNAMO = "dynamo"
    KVD = "kvd"
    LMETRIC = "lmetric"
    RAMJET = "ramjet"
    RAMJET_TUNED = "ramjet-tuned"

    @property
    def row(self) -> Mapping[str, Any]:
        """The members of the core's settings that make it."""
        return _ROWS[self]

    @classmethod
    def of(cls, settings: Settings) -> RouterPolicy:
        """Returns the policy of some settings."""
        held = {name: settings.members[name] for name in ROW}
        return next(policy for policy, row in _ROWS.items() if row == held)


def weights_of(settings: Settings) -> dict[str, float | None]:
    """Returns the weights of the cost that is in force, by their names in the core's settings."""
    names = WEIGHTS if settings.members["weighted"] else DYNAMO_WEIGHTS
    return {name: settings.members[name] for name in names}


def _row(**weights: float) -> Mapping[str, Any]:
    """Returns a row of the weighted cost; what is not named weighs nothing."""
    return MappingProxyType(
        dict.fromkeys(WEIGHTS, 0.0) | {"weighted": True, "saturation": None} | weights
    )


def _ramjet(alpha: float, cap: float, unit_of_load: float) -> Mapping[str, Any]:
    tokens = 512  # of a unit of overlap
    return _row(
        uncached=1.0,
        queued=tokens * alpha / unit_of_load,
        per_request=tokens * alpha,
        saturation=tokens * cap,
    )


_ROWS: dict[RouterPolicy, Mapping[str, Any]] = {
    RouterPolicy.DYNAMO: MappingProxyType({name: Settings().members[name] for name in ROW}),
    RouterPolicy.KVD: _row(uncached=1.0, hold_up=0.1, queued=1.0),
    RouterPolicy.LMETRIC: _row(product=1.0),
    RouterPolicy.RAMJET: _ramjet(4.0, 32.0, 8192.0),
    RouterPolicy.RAMJET_TUNED: _ramjet(0.883, 68.0, 4552.0),
}
