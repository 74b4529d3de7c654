"""The result of weighing the candidates for a request without choosing: basis, chances, costs."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from kvd.selection.phases import Phase
from kvd.selection.policies import Policy
from kvd.wire.event_stream import StreamHealth
from kvd_core.selector.selector import Chance, Explained
from kvd_core.selector.settings import LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings


class Basis(StrEnum):
    """What decides which rank is chosen."""

    SESSION = "session"  # the rank that the request's session is bound to
    AFFINITY = "affinity_target"  # the rank that the request names
    COST = "cost"
    REQUESTS = "requests"  # the number of live requests
    TURNS = "turns"
    CHANCE = "chance"


class ChoiceAttempt(NamedTuple):
    """The parameters of one attempt to choose; masks and factors are those of `Pool.choose`."""

    basis: Basis
    settings: Settings
    eligible: bytes | None
    factors: bytes | None


class Term(NamedTuple):
    """A part of a rank's cost."""

    name: str
    weight: float
    cost: float


class WeighedRank(NamedTuple):
    """The cost of one rank: the sum of its terms, in their order, times the rank's preference."""

    row: Explained
    cost: float | None  # None: the mode weighs no cost
    terms: list[Term]
    exceeded: list[str]  # names of the thresholds that it exceeds
    stream: StreamHealth | None
    expected_ttft_s: float | None


class Weighed(NamedTuple):
    """The candidates, weighed for one phase of a request."""

    phase: Phase | None
    basis: Basis
    policy: Policy  # the request's; a decode is weighed by blocks in use under every policy
    settings: Settings
    chances: list[Chance] | int  # by position in the pool; an int is the reason why none is chosen
    ranks: list[WeighedRank]  # in the order of the pool


# For each term its name, its weight's name in the settings, and its member of Explained.
_DYNAMO = (
    ("prefill", "overlap_weight", "prefill_cost"),
    ("decode", None, "decode_cost"),
    ("requests", "active_request_weight", "request_cost"),
)
_WEIGHTED = (
    ("uncached", "uncached", "uncached_cost"),
    ("hold_up", "hold_up", "hold_up_cost"),
    ("crowding", "crowding", "crowding_cost"),
    ("queued", "queued", "queued_cost"),
    ("requests", "per_request", "request_cost"),
    ("blocks", "per_block", "block_cost"),
    ("product", "product", "product_cost"),
)


def basis_of(settings: Settings) -> Basis:
    """Returns what decides where neither a session nor an affinity target does."""
    by_mode = {
        LEAST_LOADED: Basis.REQUESTS,
        ROUND_ROBIN: Basis.TURNS,
        RANDOM: Basis.CHANCE,
    }
    return by_mode.get(_mode(settings), Basis.COST)


def cost_of(row: Explained, settings: Settings) -> float | None:
    """Returns the figure that the mode wants lowest; None in modes without such a figure."""
    mode = _mode(settings)
    if mode == LEAST_LOADED:
        return float(row.active_requests)
    return None if mode in (ROUND_ROBIN, RANDOM) else row.cost


def terms(row: Explained, settings: Settings) -> list[Term]:
    """Returns the terms of a rank's cost, in the order in which the core adds them up."""
    members, mode = settings.members, _mode(settings)
    if mode == LEAST_LOADED:
        return [Term("requests", 1.0, float(row.active_requests))]
    if mode in (ROUND_ROBIN, RANDOM):
        return []
    return [
        Term(name, float(members[weight] or 0.0) if weight else 1.0, getattr(row, cost))
        for name, weight, cost in (_WEIGHTED if members["weighted"] else _DYNAMO)
    ]


def _mode(settings: Settings) -> int:
    return int(settings.members["mode"] or 0)
