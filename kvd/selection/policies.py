"""The router's policies: costs by name, each a row of weights of the core's settings.

`dynamo` is Dynamo's function with the weights that operators and requests give it. The others are
rows of the weighted cost, in tokens (kvd_core/selector/cost.pxd):

    cost = uncached n (1 + hold_up D) + crowding A min(n, crowding_limit) + queued P
           + per_request A + per_block U + product max(1, P + n) (A + 1)

with n tokens of the prompt to compute on the rank, P tokens being prefilled there, D requests that
decode, A live ones, U tokens of the blocks in use; n counts at most `saturation` more than for
the rank that has fewest.

    policy        uncached  crowding  queued  per_request  product  saturation  source
    kvd           1         0.07      0.5     0            0        off         [1]
    lmetric       0         0         0       0            1        off         [2]
    ramjet        1         0         0.25    2048         0        16384       [3], its defaults
    ramjet-tuned  1         0         0.0993  452.1        0        34816       [3], as tuned there

Under kvd the crowding counts at most 16,384 tokens of n, or long prompts would wait longest.

[1] our replays of recorded requests (docs/policies.md). [2] LMetric, arXiv 2603.15202: its
(P + n) (A + 1) as published. [3] ai-dynamo/dynamo, branch rupei/learned-routing-public.

Ramjet chooses the highest min(W, cap) - min(W - O, cap) - a (A + P / u) with the overlap O of a
rank and the deepest W in units of 512 tokens. W is the same for all, so that is the lowest
min(512 (W - O), 512 cap) + 512 a A + (512 a / u) P in tokens: saturation 512 cap, per_request
512 a and queued 512 a / u, with a 4, cap 32, u 8192, and tuned 0.883, 68, 4552. It counts whole
units of the device; here tokens count, and blocks of lower tiers as everywhere.

No row weighs blocks in use: where prompts are long they only show how much a rank caches of them.
Under kvd a session stays with its rank while that has at most 1.177 (mean + 1) live requests, the
bound of [3]'s sticky sessions; the others set none.

A row with other weights is called by its policy and these: `kvd,hold_up=0.2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kvd_core.selector.settings import Settings

# Of the weighted cost: weights, and after them what can be off.
WEIGHTS = (
    "uncached",
    "hold_up",
    "crowding",
    "crowding_limit",
    "queued",
    "per_request",
    "per_block",
    "product",
    "saturation",
    "session_bound",
)
# Weights of Dynamo's cost function.
DYNAMO_WEIGHTS = (
    "overlap_weight",
    "device_credit",
    "credit_decay",
    "active_request_weight",
    "session_bound",
)
CAN_BE_OFF = ("crowding_limit", "saturation", "session_bound")
OFF = "off"  # of those, in a text
SHOWN = 40  # characters of a wrong weight that its error shows

# The settings that a policy is a row of: its name, which cost, then weights of the weighted one.
ROW = ("policy", "weighted", *WEIGHTS)
# The same, with what a policy may say of Dynamo's function.
MEMBERS = tuple(dict.fromkeys((*ROW, *DYNAMO_WEIGHTS)))


class RouterPolicy(StrEnum):
    """The name of a cost function for mode `kv`."""

    DYNAMO = "dynamo"
    KVD = "kvd"
    LMETRIC = "lmetric"
    RAMJET = "ramjet"
    RAMJET_TUNED = "ramjet-tuned"

    @property
    def row(self) -> Mapping[str, Any]:
        """The members of the core's settings that make it."""
        return _ROWS[self]

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of its weights."""
        return WEIGHTS if self.row["weighted"] else DYNAMO_WEIGHTS


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy with some weights of its own; its text is its name, which `parse` reads."""

    preset: RouterPolicy
    own: tuple[tuple[str, float | None], ...] = ()  # weights, in the order of their names' table

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """Returns the policy of some settings."""
        return cls.named(str(settings.members["policy"]), weights_of(settings))

    @classmethod
    def named(cls, name: str, weights: Mapping[str, float | None]) -> Policy:
        """Returns a policy with other weights; raises ValueError that names what is wrong."""
        if name not in set(RouterPolicy):
            raise ValueError(f"expected one of {', '.join(RouterPolicy)}")
        preset = RouterPolicy(name)
        for each, value in weights.items():
            if each not in preset.weights:
                known = ", ".join(preset.weights)
                raise ValueError(f"{each[:SHOWN]}: no such weight of {preset}, which has {known}")
            if value is None and each not in CAN_BE_OFF:
                raise ValueError(f"{each}: expected a number")
        held = Settings(**{**preset.row, **weights}).members  # which checks them
        plain = Settings(**preset.row).members
        own = ((each, held[each]) for each in preset.weights if held[each] != plain[each])
        return cls(preset, tuple(own))

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Reads `NAME[,WEIGHT=NUMBER]...`; raises ValueError as `named` does."""
        name, *pairs = text.split(",")
        weights: dict[str, float | None] = {}
        for pair in pairs:
            weight, _, value = pair.partition("=")
            try:
                weights[weight] = None if value == OFF else float(value)
            except ValueError:
                raise ValueError(f"{pair[:SHOWN]}: expected WEIGHT=NUMBER") from None
        return cls.named(name.lower(), weights)

    def with_weights(self, weights: Mapping[str, float | None]) -> Policy:
        """Returns it with other weights; raises ValueError as `named` does."""
        return self.named(self.preset, {**dict(self.own), **weights})

    @property
    def row(self) -> Mapping[str, Any]:
        """The members of the core's settings that make it."""
        return {**self.preset.row, **dict(self.own)}

    def __str__(self) -> str:
        weights = (f"{name}={_text(value)}" for name, value in self.own)
        return ",".join((self.preset, *weights))


def weights_of(settings: Settings) -> dict[str, float | None]:
    """Returns the weights of the cost that is in force, by their names in the core's settings."""
    names = WEIGHTS if settings.members["weighted"] else DYNAMO_WEIGHTS
    return {name: settings.members[name] for name in names}


def _text(value: float | None) -> str:
    return OFF if value is None else repr(value).removesuffix(".0")


def _row(policy: str, **weights: float) -> Mapping[str, Any]:
    """Returns a row of the weighted cost; what is not named weighs nothing, or is off."""
    row = dict.fromkeys(WEIGHTS, 0.0) | dict.fromkeys(CAN_BE_OFF) | weights
    return MappingProxyType(row | {"policy": policy, "weighted": True})


def _ramjet(policy: str, alpha: float, cap: float, unit_of_load: float) -> Mapping[str, Any]:
    tokens = 512  # of a unit of overlap
    return _row(
        policy,
        uncached=1.0,
        queued=tokens * alpha / unit_of_load,
        per_request=tokens * alpha,
        saturation=tokens * cap,
    )


_ROWS: dict[RouterPolicy, Mapping[str, Any]] = {
    RouterPolicy.DYNAMO: MappingProxyType({name: Settings().members[name] for name in ROW}),
    RouterPolicy.KVD: _row(
        "kvd", uncached=1.0, crowding=0.07, crowding_limit=16384.0, queued=0.5, session_bound=1.177
    ),
    RouterPolicy.LMETRIC: _row("lmetric", product=1.0),
    RouterPolicy.RAMJET: _ramjet("ramjet", 4.0, 32.0, 8192.0),
    RouterPolicy.RAMJET_TUNED: _ramjet("ramjet-tuned", 0.883, 68.0, 4552.0),
}
