"""Writes an explanation as the members of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvd.faces.explain.questions import BookedRequest, ExplainRequest, HashedPrompt
from kvd.faces.explain.traces import Event, TracedRank, Traces
from kvd.selection.options import RouterMode
from kvd.selection.weighing import Basis, Weighed, WeighedRank
from kvd_core.index.chronicle import Chronicle
from kvd_core.index.prefix_index import TIERS
from kvd_core.index.trace import End
from kvd_core.selector import selector
from kvd_core.selector.selector import Chance, Explained

MAX_CANDIDATES = 256  # candidates shown of a phase, the most likely ones first: 1 kB each
MAX_EVENTS = 100  # newest events that are shown

REFUSALS = {
    selector.NONE: "nobody_eligible",
    selector.BUSY: "all_busy",
    selector.OVERLOADED: "all_overloaded",
}
NOT_CHOSEN_HERE = "no_selection"  # the model has an index, but no workers to choose from

# Members of Explained from which costs are computed; answers show them beside the terms.
FACTS = (
    "cached_tokens",
    "effective_prefill_tokens",
    "potential_decode_blocks",
    "raw_prefill_blocks",
    "credit_blocks",
    "counted_tokens",
    "live_blocks",
    "active_prefill_tokens",
    "active_decode_blocks",
    "active_requests",
    "decoding_requests",
)
# The unit of costs, for each basis of a choice whose costs are neither in blocks nor in tokens.
UNITS = {Basis.REQUESTS: "requests", Basis.TURNS: None, Basis.CHANCE: None}


class ExplanationWriter:
    """Writes what was found about one prompt."""

    def __init__(self, prompt: HashedPrompt, traces: Traces, now: float) -> None:
        self._prompt = prompt
        self._traces = traces
        self._now = now

    def choice(self, weighed: Weighed) -> dict[str, Any]:
        """Returns how a rank would be chosen for one phase."""
        chances = weighed.chances
        refusal = REFUSALS[chances] if isinstance(chances, int) else None
        by_position = {} if isinstance(chances, int) else {each.position: each for each in chances}
        order = sorted(
            range(len(weighed.ranks)),
            key=lambda at: (
                -(by_position[at].chance if at in by_position else -1.0),
                weighed.ranks[at].row.cost,
                at,
            ),
        )
        first = [at for at in order if at in by_position]
        members = weighed.settings.members
        unit = "tokens" if members["weighted"] else "blocks"
        return {
            "phase": weighed.phase,
            "by": weighed.basis,
            "router_mode": RouterMode.of(weighed.settings),
            "router_policy": str(weighed.policy),
            "temperature": members["temperature"],
            "unit": UNITS.get(weighed.basis, unit),
            "refusal": refusal,
            "chosen": self._named(weighed, first, 0, by_position),
            "runner_up": self._named(weighed, first, 1, by_position),
            "candidates": [
                self._candidate(weighed, at, by_position) for at in order[:MAX_CANDIDATES]
            ],
            "more_candidates": max(0, len(order) - MAX_CANDIDATES),
        }

    def unchosen(self, stream: Callable[[int | str, int], str | None]) -> dict[str, Any]:
        """Returns what each rank caches, for a model whose ranks are not chosen here.

        `stream` returns the health of a rank's stream.
        """
        rows = sorted(self._traces.rows.items(), key=lambda row: (-row[1].all.depth, str(row[0])))
        return {
            "phase": None,
            "by": None,
            "router_mode": None,
            "router_policy": None,
            "temperature": 0.0,
            "unit": None,
            "refusal": NOT_CHOSEN_HERE,
            "chosen": None,
            "runner_up": None,
            "candidates": [
                _rank_members(*traced_rank)
                | {"stream": stream(*traced_rank)}
                | self._cached(traced_rank, None)
                for traced_rank, _ in rows[:MAX_CANDIDATES]
            ],
            "more_candidates": max(0, len(rows) - MAX_CANDIDATES),
        }

    def events(self) -> dict[str, Any]:
        """Returns what has happened to the prompt's blocks, the newest last."""
        events = self._traces.events
        left_out = sum(each.changes for each in events[:-MAX_EVENTS]) + self._traces.left_out
        return {
            "timeline": [self._event(each) for each in events[-MAX_EVENTS:]],
            "timeline_left_out": left_out,
        }

    def _named(
        self, weighed: Weighed, order: list[int], number: int, chances: Mapping[int, Chance]
    ) -> dict[str, Any] | None:
        """Returns the candidate of a number in an order, None if the order is shorter.

        `behind` is by how much it costs more than the first.
        """
        if len(order) <= number:
            return None
        at = order[number]
        rank, least = weighed.ranks[at], weighed.ranks[order[0]].cost
        return {
            **_rank_members(rank.row.worker_id, rank.row.dp_rank),
            "chance": chances[at].chance,
            "cost": rank.cost,
            "behind": None if rank.cost is None or least is None else rank.cost - least,
        }

    def _candidate(
        self, weighed: Weighed, at: int, chances: Mapping[int, Chance]
    ) -> dict[str, Any]:
        rank = weighed.ranks[at]
        row = rank.row
        return {
            **_rank_members(row.worker_id, row.dp_rank),
            "chance": chances[at].chance if at in chances else 0.0,
            "shut_out": _shut_out(rank, at in chances),
            "exceeded": rank.exceeded,
            "cost": rank.cost,
            "preference": row.preference,
            "terms": [each._asdict() for each in rank.terms],
            "facts": {name: getattr(row, name) for name in FACTS},
            "stream": rank.stream,
            "expected_ttft_s": rank.expected_ttft_s,
            **self._cached((row.worker_id, row.dp_rank), row),
        }

    # ---- what is cached, and why not more

    def _cached(self, traced_rank: TracedRank, row: Explained | None) -> dict[str, Any]:
        traced = self._traces.rows.get(traced_rank)
        announced = 0 if traced is None else traced.all.depth
        blocks = announced if row is None else row.device_blocks + row.host_blocks + row.disk_blocks
        tiers = []
        if traced is not None and (row is None or row.heard):
            begin = 0
            for tier, end in enumerate(traced.tiers):
                if end.depth > begin or end.at is not None:
                    shown = {"tier": TIERS[tier], "from": begin, "to": end.depth}
                    tiers.append(shown | self._end(self._known(end)))
                begin = end.depth
        return {
            "blocks": blocks,
            "predicted_blocks": max(0, blocks - announced),
            "tiers": tiers,
            "ended": self._ended(traced_rank, row, blocks, announced),
        }

    def _ended(
        self, traced_rank: TracedRank, row: Explained | None, blocks: int, announced: int
    ) -> dict[str, Any]:
        """Returns why a rank caches only `blocks`, of which `announced` come from events."""
        traced = self._traces.rows.get(traced_rank)
        why = {"at_block": blocks, "tier": None, "age_s": None, "elsewhere_blocks": None}
        if blocks == self._prompt.blocks:
            return why | {"why": "end_of_prompt"}
        if row is not None and not row.heard:
            return why | {"why": "not_heard"}
        if blocks > announced:
            return why | {"why": "not_predicted"}
        if traced is None:
            return why | {"why": "no_events"}
        end = self._known(traced.all)
        elsewhere = self._traces.elsewhere.get(traced_rank)
        if end.why in ("never_stored", "unknown") and elsewhere and elsewhere.blocks > blocks:
            return why | {"why": elsewhere.why, "elsewhere_blocks": elsewhere.blocks}
        tier = None if end.at is None else TIERS[end.tier]
        return why | {"tier": tier} | self._end(end)

    def _known(self, end: End) -> End:
        """Returns an end; its reason is unknown where the content of the next block is unknown."""
        if end.why == "never_stored" and end.depth >= self._prompt.known:
            return end._replace(why="unknown")
        return end

    def _end(self, end: End) -> dict[str, Any]:
        return {"why": end.why, "age_s": None if end.at is None else self._age(end.at)}

    def _age(self, at: float) -> float:
        return round(max(0.0, self._now - at), 2)

    def _event(self, each: Event) -> dict[str, Any]:
        return {
            "age_s": self._age(each.began_at),
            "kind": each.kind,
            **_rank_members(each.worker_id, each.dp_rank),
            "tiers": each.tiers,
            "from": each.begin,
            "to": each.end,
            "changes": each.changes,
        }


def heading(
    question: ExplainRequest, prompt: HashedPrompt, block_size: int, now: float
) -> dict[str, Any]:
    """Returns the members that name what is explained."""
    return {
        "model_name": question.key.model_name,
        "tenant_id": question.key.tenant_id,
        "block_size": block_size,
        "blocks": prompt.blocks,
        "request": None if question.booked is None else _booked(question.booked, now),
    }


def chronicled(chronicle: Chronicle | None, now: float) -> dict[str, Any]:
    """Returns the size of the chronicle, and how far back it reaches."""
    if chronicle is None:
        return {"changes": 0, "overwritten": 0, "capacity": 0, "reach_s": 0.0}
    return {
        "changes": chronicle.noted,
        "overwritten": chronicle.overwritten,
        "capacity": chronicle.capacity,
        "reach_s": round(max(0.0, now - chronicle.reach), 2),
    }


def _booked(booked: BookedRequest, now: float) -> dict[str, Any]:
    live = booked.live
    return {
        "request_id": booked.request_id,
        **_rank_members(live.worker_id, live.dp_rank),
        "age_s": round(max(0.0, now - live.admitted_at), 2),
        "blocks": live.blocks,
        "prefill_tokens": live.tokens,
        "active_prefill_tokens": live.prefill_tokens,
    }


def _rank_members(worker_id: int | str, dp_rank: int) -> dict[str, Any]:
    return {"worker_id": str(worker_id), "dp_rank": dp_rank}


def _shut_out(rank: WeighedRank, is_open: bool) -> str | None:
    """Returns why a rank cannot be chosen, None if it can."""
    row = rank.row
    if is_open:
        return None
    if not row.reachable:
        return "unreachable"
    if not row.eligible:
        return "not_eligible"
    return "overloaded" if row.overloaded else "busy" if row.busy else "not_preferred"
