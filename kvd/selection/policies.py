"""The router's policies: named costs, each a row of weights in the core's settings.

`dynamo` is Dynamo's cost function with the weights that operators and requests give it. The others
are rows of the weighted cost, in tokens (kvd_core/selector/cost.pxd):

    cost = uncached n (1 + hold_up D) + crowding A min(n, crowding_limit) + queued P
           + per_request A + per_block U + product max(1, P + n) (A + 1)

where the rank has n tokens of the prompt to compute, P tokens being prefilled, D requests that
decode, A live requests, and U tokens in blocks in use. n counts at most `saturation` tokens more
than on the rank with the least n.

    policy        uncached  crowding  queued  per_request  product  saturation  source
    kvd           1         0.07      0.5     0            0        off         [1]
    lmetric       0         0         0       0            1        off         [2]
    ramjet        1         0         0.25    2048         0        16384       [3], its defaults
    ramjet-tuned  1         0         0.0993  452.1        0        34816       [3], as tuned there

Under kvd the crowding counts at most 16,384 tokens of n, or long prompts would wait longest.

[1] our replays of recorded requests (docs/policies.md). [2] LMetric, arXiv 2603.15202: its
(P + n) (A + 1) as published. [3] ai-dynamo/dynamo, branch rupei/learned-routing-public.

Ramjet chooses the rank with the highest min(W, cap) - min(W - O, cap) - a (A + P / u), where O is
the rank's overlap and W the deepest overlap of all ranks, in units of 512 tokens. W is the same for
all ranks, so this is the rank with the lowest min(512 (W - O), 512 cap) + 512 a A + (512 a / u) P
in tokens: saturation = 512 cap, per_request = 512 a, queued = 512 a / u. The defaults are a = 4,
cap = 32, u = 8192; the tuned values are 0.883, 68 and 4552. Ramjet counts whole units on the device
tier; here single tokens count, and blocks of lower tiers count as everywhere.

No row weighs blocks in use: with long prompts they only show how much of the prompts a rank caches.
Under kvd a session stays with its rank while the rank has at most 1.177 (mean + 1) live requests,
the bound of [3]'s sticky sessions; the other rows set no bound.

A row with other weights is named by its policy and those weights: `kvd,hold_up=0.2`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from kvd_core.selector.settings import Settings

# The weights of the weighted cost, and its limits and bounds.
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
OFF = "off"  # how the text of a policy writes that one of these is off
SHOWN = 40  # characters of a wrong weight that its error shows

# The settings in a policy's row: its name, whether its cost is the weighted one, and the weights.
ROW = ("policy", "weighted", *WEIGHTS)
# All settings that a policy may set: its row, and the weights of Dynamo's function.
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
        """The members of the core's settings that make this policy."""
        return _ROWS[self]

    @property
    def weights(self) -> tuple[str, ...]:
        """The names of its weights."""
        return WEIGHTS if self.row["weighted"] else DYNAMO_WEIGHTS


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy, perhaps with weights of its own; `parse` reads what `str` writes."""

    preset: RouterPolicy
    own: tuple[tuple[str, float | None], ...] = ()  # weights that differ, in the preset's order

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """Returns the policy that settings of the core have."""
        return cls.named(str(settings.members["policy"]), weights_of(settings))

    @classmethod
    def named(cls, name: str, weights: Mapping[str, float | None]) -> Policy:
        """Returns a named policy with these weights; raises ValueError that says what is wrong."""
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
        """Returns this policy with further weights; raises ValueError as `named` does."""
        return self.named(self.preset, {**dict(self.own), **weights})

    @property
    def row(self) -> Mapping[str, Any]:
        """The members of the core's settings that make this policy."""
        return {**self.preset.row, **dict(self.own)}

    def __str__(self) -> str:
        weights = (f"{name}={_text(value)}" for name, value in self.own)
        return ",".join((self.preset, *weights))


def weights_of(settings: Settings) -> dict[str, float | None]:
    """Returns the weights of the cost that settings choose, by their names there."""
    names = WEIGHTS if settings.members["weighted"] else DYNAMO_WEIGHTS
    return {name: settings.members[name] for name in names}


def _text(value: float | None) -> str:
    return OFF if value is None else repr(value).removesuffix(".0")


def _row(policy: str, **weights: float) -> Mapping[str, Any]:
    """Returns a row of the weighted cost; weights that are not named are 0 or off."""
    row = dict.fromkeys(WEIGHTS, 0.0) | dict.fromkeys(CAN_BE_OFF) | weights
    return MappingProxyType(row | {"policy": policy, "weighted": True})


def _ramjet(policy: str, alpha: float, cap: float, unit_of_load: float) -> Mapping[str, Any]:
    tokens = 512  # in Ramjet's unit of overlap
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
