"""A live picture of kvd as one bounded JSON document: GET /picture.

It is written piece by piece, so that other tasks run in between, and shows at most MAX_RANKS ranks,
MAX_MODELS models and MAX_DOUBTFUL streams. The counts of streams are of all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Protocol

import trio

from kvd._version import VERSION
from kvd.faces.common.bodies import render
from kvd.faces.common.paths import BRANCHES_PATH, PICTURE_PATH
from kvd.faces.common.slices import sliced
from kvd.faces.ui.history import MAX_RANKS, SAMPLE_S, History, Sums
from kvd.faces.ui.ranks import RankRows, Rows, named
from kvd.http.messages import Request, Response
from kvd.http.routes import ConcurrencyLimit, Route
from kvd.index.partitions import Partition, State
from kvd.index.publishers import Publisher, Publishers
from kvd.index.registry import Registry
from kvd.selection.service import Selections
from kvd.selection.stats import CACHING
from kvd.slots.live_requests import LedgerOwner
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.metrics import BREATH, RequestMetrics
from kvd.wire.event_stream import StreamHealth

MAX_MODELS = 64  # models and tenants shown, 0.3 kB each
MAX_DOUBTFUL = 64  # streams listed because they are not exact, 0.5 kB each
MAX_PICTURES = 8  # pictures written at a time, some 100 kB each at most
SLICE_RANKS = 16  # rows of ranks between two checkpoints: 1 ms
OWN_PATHS = frozenset({PICTURE_PATH, BRANCHES_PATH})  # not counted: they only show the others


class FaceShown(Protocol):
    """The part of the picture about a face."""

    @property
    def name(self) -> str: ...
    @property
    def requests(self) -> RequestMetrics: ...
    def addresses(self) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class PicturedParts:
    """The parts of the daemon that the picture shows."""

    state: State
    registry: Registry
    publishers: Publishers
    slots: SlotTrackers
    selections: Selections
    faces: Sequence[FaceShown]


class Picture:
    """Shows the parts of the daemon, and what they have done lately."""

    def __init__(self, parts: PicturedParts) -> None:
        self._parts = parts
        self._ranks = RankRows(parts.state, parts.registry, parts.slots, parts.selections)
        self.history = History(
            parts.selections,
            self._sums,
            lambda: self._ranks.first()[:MAX_RANKS],
            self._ranks.requests,
        )
        self.run = self.history.run
        self.admission = ConcurrencyLimit(
            MAX_PICTURES, f"{MAX_PICTURES} pictures are being written"
        )

    def route(self) -> Route:
        return Route("GET", PICTURE_PATH, self.show, admission=self.admission)

    def show(self, request: Request) -> Response:
        """Streams the picture, and keeps the history going."""
        self.history.keep_sampling()
        headers = [(b"cache-control", b"no-store")]
        return Response(200, sliced(self._pieces(trio.current_time())), headers=headers)

    def _sums(self) -> Sums:
        parts = self._parts
        tallied = parts.state.ended_totals
        partitions = parts.state.sized.values()
        stats = parts.selections.choice_stats
        choices = [stats.choices(phase) for phase in CACHING]
        ingested = parts.state.ingest.as_dict()
        owners: list[LedgerOwner] = [
            *parts.slots.trackers.values(),
            *parts.selections.candidates.values(),
        ]
        return Sums(
            requests=sum(face.requests.total(OWN_PATHS) for face in parts.faces),
            events=ingested["stored"] + ingested["removed"] + ingested["cleared"],
            questions=tallied["questions"] + sum(each.index.questions for each in partitions),
            matched=tallied["matched"] + sum(each.index.matched for each in partitions),
            prompt_tokens=sum(each["prompt_tokens"] for each in choices),
            cached_tokens=sum(each["cached_tokens"] for each in choices),
            live=sum(owner.ledger.stats()["requests"] for owner in owners),
            queued=parts.selections.scheduler.held,
        )

    def _pieces(self, now: float) -> Iterator[bytes]:
        """Yields the document, and b"" where other tasks may run."""
        rows = Rows(self._ranks, now)
        sums, history = self._sums(), self.history
        yield b'{"kvd":' + render({"version": VERSION, "process": self._parts.state.instance_id})
        yield b',"faces":' + render([_face(face) for face in self._parts.faces])
        yield b',"totals":' + render(sums._asdict())
        curves = {
            each.name: list(getattr(history.curves, each.name)) for each in fields(history.curves)
        }
        yield b',"history":' + render({"interval_s": SAMPLE_S} | curves)
        decisions = [{"age_s": round(now - at, 1)} | _shown(made) for at, made in history.decisions]
        yield b',"decisions":' + render(decisions[::-1])
        yield b',"streams":'
        yield from self._streams(rows)
        yield b',"models":['
        models = islice(list(self._parts.state.sized.values()), MAX_MODELS)
        yield from _rows(map(_model, models), 1)
        first = self._ranks.first()
        yield b'],"more_models":%s' % _flag(len(self._parts.state.sized) > MAX_MODELS)
        yield b',"more_ranks":%s,"ranks":[' % _flag(len(first) > MAX_RANKS)
        shown = (rows.row(key, history.by_rank.get(key)) for key in first[:MAX_RANKS])
        yield from _rows(shown, SLICE_RANKS)
        yield b"]}"

    def _streams(self, rows: Rows) -> Iterator[bytes]:
        """Yields the number of streams in each state, and the first that are not exact."""
        counts = Counter(dict.fromkeys(map(str, StreamHealth), 0))
        doubtful: list[dict[str, Any]] = []
        registered = [(each.key, each.listener) for each in self._parts.registry.registrations()]
        for number, (key, listener) in enumerate(registered, 1):
            health = listener.health(rows.now)
            counts[health] += 1
            if health is not StreamHealth.EXACT and len(doubtful) < MAX_DOUBTFUL:
                doubtful.append({"of": "worker"} | named(key) | rows.stream(listener))
            if number % BREATH == 0:
                yield b""
        for number, publisher in enumerate(list(self._parts.publishers), 1):
            health = publisher.listener.health(rows.now)
            counts[health] += 1
            if health is not StreamHealth.EXACT and len(doubtful) < MAX_DOUBTFUL:
                doubtful.append(_publisher(publisher) | rows.stream(publisher.listener))
            if number % BREATH == 0:
                yield b""
        yield render({"counts": counts, "doubtful": doubtful})


def _rows(rows: Iterable[dict[str, Any]], rest: int) -> Iterator[bytes]:
    for number, row in enumerate(rows):
        yield (b"," if number else b"") + render(row)
        if number % rest == rest - 1:
            yield b""


def _flag(value: bool) -> bytes:
    return b"true" if value else b"false"


def _face(face: FaceShown) -> dict[str, Any]:
    requests = face.requests.total(OWN_PATHS)
    return {"name": face.name, "addresses": face.addresses(), "requests": requests}


def _model(partition: Partition) -> dict[str, Any]:
    stats = partition.index.stats()
    return {
        "model_name": partition.key.model_name,
        "tenant_id": partition.key.tenant_id,
        "block_size": partition.block_size,
        "blocks": stats["blocks"],
        "chains": stats["chains"],
        "held": stats["held"],
        "questions": stats["questions"],
        "matched": stats["matched"],
        "never_matches": partition.is_unmatched,
    }


def _publisher(publisher: Publisher) -> dict[str, Any]:
    described = publisher.described
    return {
        "of": "publisher",
        "model_name": described.model_name,
        "tenant_id": described.tenant_id,
        "worker_id": described.instance_id,
        "dp_rank": described.dp_rank,
    }


def _shown(made: dict[str, object]) -> dict[str, object]:
    """Returns a choice with the picture's names of members."""
    shown = {"model_name": made["model"], "tenant_id": made["tenant"], **made}
    shown["worker_id"] = str(made["worker_id"])
    return {name: value for name, value in shown.items() if name not in ("model", "tenant")}
