"""Speeds of ranks, learned from their requests or given in the record of their worker.

    booked                     prefill complete                freed
      │  x = tokens queued on     │  T = time since then          │  t = time per output token
      │      the rank, own        │                               │      D live requests of its rank
      │      included             v                               v
      │                       T = a + b x                     t = c + d D
      │                       a: seconds before any token     c: seconds a step
      │                       1 / b: tokens a second          d: seconds that each request adds

Each line is fitted by the method of Theil and Sen: the slope is the median of the slopes between
all pairs of the last WINDOW observations, and the base is the median of the remainders. Up to three
observations in ten may therefore be outliers, from engines that stall or clients that report late.
A line is fitted at its first use, and again after REFIT further observations.

The confidence in a line is from 0 to 1: it grows with the observations, falls with their scatter
and halves with every FADES_S seconds without an observation. Below CONFIDENT nothing is predicted.
When STREAK observations in a row lie far from the line on the same side, the engine's speed has
changed, and the older observations are dropped.

If requests are many, only some are observed (kvd_core.base.sampling); the others cost 50 ns a step.

Costs: 0.6 µs for an observation, 10 µs for a fit; memory some 5 KB for each line, two lines a rank.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvd.model import PartitionKey
from kvd.selection.candidates import Candidates
from kvd.selection.regression import fit
from kvd.selection.regret import Rank, Regret
from kvd.selection.worker_record import WorkerRecord
from kvd.slots.live_requests import Moment
from kvd.wire.lifecycle import Step
from kvd_core.base.sampling import Sample

WINDOW = 48  # observations that a line is fitted to: 1,128 pairs
ENOUGH = 16  # observations for full confidence
REFIT = 8  # further observations after which a line is fitted anew
FADES_S = 3600.0  # seconds without an observation that halve the confidence
CONFIDENT = 0.5  # least confidence at which a line is used for predictions
STREAK = 10  # observations in a row, far from the line on one side, that show a changed engine
FAR = 0.25  # least distance of such an observation from the line, as a share of the prediction
NARROW = 0.1  # share of the median: if half of all x lie closer to it, no slope can be fitted
MAX_OBSERVED = 4096  # live requests that are observed; beyond that the oldest are forgotten


_NONE: dict[int, _Lines] = {}  # of a worker without any


class Estimate(NamedTuple):
    """A line, and how far it can be believed."""

    base: float  # seconds at x = 0
    slope: float  # seconds for each unit of x
    confidence: float  # 0 to 1
    observations: int


@dataclass(slots=True)
class Line:
    """The last observations of one rank, and the line through them."""

    points: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    last_at: float = 0.0  # seconds of the service's clock
    _fitted: tuple[float, float, float] | None = None  # base, slope, scatter as a share
    _since: int = 0  # observations since that fit
    _streak: int = 0  # above the line if positive, below it if negative

    def add(self, x: float, seconds: float, at: float) -> None:
        """Adds an observation of `seconds` at x, unless one of them is not positive."""
        if seconds <= 0.0 or x <= 0.0:
            return
        self.last_at = at
        self._note_side(x, seconds)
        self.points.append((x, seconds))
        self._since += 1
        if abs(self._streak) >= STREAK:
            self._begin_anew()

    def _note_side(self, x: float, seconds: float) -> None:
        """Counts observations in a row that lie far from the line on the same side."""
        if self._fitted is None:
            return
        base, slope, scatter = self._fitted
        predicted = base + slope * x
        off = seconds - predicted
        if abs(off) <= max(FAR, 3.0 * scatter) * predicted:
            self._streak = 0
        elif off > 0.0:
            self._streak = max(self._streak, 0) + 1
        else:
            self._streak = min(self._streak, 0) - 1

    def _begin_anew(self) -> None:
        last = [self.points[at] for at in range(-STREAK, 0)]
        self.points.clear()
        self.points.extend(last)
        self._streak, self._fitted = 0, None

    def estimate(self, now: float) -> Estimate | None:
        """Returns the line through the observations, None if none can be fitted yet."""
        if self._fitted is None or self._since >= REFIT:
            self._fitted, self._since = fit(self.points, NARROW), 0
        if self._fitted is None:
            return None
        base, slope, scatter = self._fitted
        count = len(self.points)
        fresh = 0.5 ** (max(0.0, now - self.last_at) / FADES_S)
        confidence = min(1.0, count / ENOUGH) * max(0.0, 1.0 - scatter) * fresh
        return Estimate(base, slope, confidence, count)


class RankSpeed(NamedTuple):
    """How fast a rank prefills."""

    base_s: float  # before the first token of a prompt on an idle rank
    token_s: float  # for each token to prefill
    confidence: float
    observations: int
    given: bool  # by the worker's record; else learned


@dataclass(slots=True)
class _Observed:
    """A live request that is observed."""

    rank: Rank
    begun_at: float
    queued_tokens: int  # on its rank when booked, its own included; 0 if it has none of its own
    expected_s: float | None  # to its first token
    complete_at: float | None = None
    requests: int = 1  # live requests on its rank at `complete_at`

    def complete(self, at: float, requests: int) -> None:
        """Notes the end of its prefill."""
        self.complete_at = at
        self.requests = requests


@dataclass(slots=True)
class _Lines:
    """The two lines of a rank."""

    prefill: Line = field(default_factory=Line)
    decode: Line = field(default_factory=Line)


class Speeds:
    """The speeds of all ranks of the service."""

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        clock: Callable[[], float],
        regret: Regret,
        sample: Sample,
    ) -> None:
        """Counts observed requests in `sample`, and reports their outcomes to `regret`."""
        self._candidates = candidates
        self._clock = clock
        self._regret = regret
        self._sample = sample
        # By model, tenant and worker id, then by dp rank.
        self._lines: dict[tuple[PartitionKey, int], dict[int, _Lines]] = {}
        self._observed: OrderedDict[str, _Observed] = OrderedDict()
        self.forgotten = 0  # observed requests beyond MAX_OBSERVED

    def observe(self, moment: Moment) -> None:
        """Observes a step of a request's life."""
        if moment.step is Step.ADD:
            self._begin(moment)
        elif moment.step is Step.PREFILL_COMPLETE:
            self._complete(moment)
        else:
            self._end(moment)

    def _begin(self, moment: Moment) -> None:
        live, candidates = moment.live, self._candidates.get(moment.key)
        if live is None or candidates is None or moment.mirrored or live.prefill_complete:
            return
        number = candidates.ledger.rank_of(live.worker_id, live.dp_rank)
        if number is None:
            return
        self._sample.count()
        rank = moment.key, live.worker_id, live.dp_rank
        queued, expected_s = 0, None
        if live.tokens:  # else another rank computes its prompt, or nothing is known of its prefill
            queued = candidates.ledger.load(number).prefill_tokens
            expected_s = self.ttft_s(rank, queued)
        self._observed[moment.request_id] = _Observed(rank, moment.time, queued, expected_s)
        if len(self._observed) > MAX_OBSERVED:
            self._observed.popitem(last=False)
            self.forgotten += 1

    def _complete(self, moment: Moment) -> None:
        seen = self._observed.get(moment.request_id)
        if seen is None or seen.complete_at is not None:
            return
        seen.complete(moment.time, self._requests_of(seen.rank))
        took_s = moment.time - seen.begun_at
        self._lines_of(seen.rank).prefill.add(seen.queued_tokens, took_s, moment.time)
        self._regret.note_ttft(seen.rank, seen.expected_s, took_s)

    def _requests_of(self, rank: Rank) -> int:
        """Returns the live requests of a rank, at least 1."""
        key, *ids = rank
        candidates = self._candidates.get(key)
        number = None if candidates is None else candidates.ledger.rank_of(*ids)
        if candidates is None or number is None:
            return 1
        return max(1, candidates.ledger.load(number).requests)

    def _end(self, moment: Moment) -> None:
        seen = self._observed.pop(moment.request_id, None)
        candidates = self._candidates.get(moment.key)
        if seen is not None and moment.live is not None and candidates is not None:
            tokens = moment.live.output_blocks * (candidates.ledger_block_size or 0)
            self._note_output(seen, tokens, moment.time)

    def note_output(self, request_id: str, tokens: int) -> None:
        """Observes an output's length, which the caller reports before it frees the request."""
        seen = self._observed.get(request_id)
        if seen is not None:
            self._note_output(seen, tokens, self._clock())

    def _note_output(self, seen: _Observed, tokens: int, now: float) -> None:
        if seen.complete_at is not None and tokens > 0:
            step_s = (now - seen.complete_at) / tokens
            self._lines_of(seen.rank).decode.add(seen.requests, step_s, now)

    def expected_of(self, request_id: str) -> float | None:
        """Returns the expected seconds to an observed request's first token, None if unknown."""
        seen = self._observed.get(request_id)
        return None if seen is None else seen.expected_s

    def _lines_of(self, rank: Rank) -> _Lines:
        key, worker_id, dp_rank = rank
        of_worker = self._lines.setdefault((key, worker_id), {})
        lines = of_worker.get(dp_rank)
        if lines is None:
            lines = of_worker[dp_rank] = _Lines()
        return lines

    def _found(self, rank: Rank) -> _Lines | None:
        key, worker_id, dp_rank = rank
        return self._lines.get((key, worker_id), _NONE).get(dp_rank)

    def known_ranks(self, record: WorkerRecord) -> Iterable[int]:
        """Returns those ranks of a worker of which a speed may be known, ascending."""
        if record.prefill_tokens_per_s:
            return record.ranks
        of_worker = self._lines.get((record.key, record.worker_id), _NONE)
        return [each for each in sorted(of_worker) if each in record.ranks]

    def prefill(self, rank: Rank) -> RankSpeed | None:
        """Returns how fast a rank prefills; None if nothing is known."""
        key, worker_id, _ = rank
        candidates = self._candidates.get(key)
        record = None if candidates is None else candidates.workers.get(worker_id)
        if record is not None and record.prefill_tokens_per_s:
            base_s = (record.decode_step_ms or 0.0) / 1000.0
            return RankSpeed(base_s, 1.0 / record.prefill_tokens_per_s, 1.0, 0, True)
        lines = self._found(rank)
        found = None if lines is None else lines.prefill.estimate(self._clock())
        if found is None:
            return None
        return RankSpeed(found.base, found.slope, found.confidence, found.observations, False)

    def decode(self, rank: Rank) -> Estimate | None:
        """Returns the seconds of an output token as a line over live requests; None if unknown."""
        lines = self._found(rank)
        return None if lines is None else lines.decode.estimate(self._clock())

    def ttft_s(self, rank: Rank, tokens: int) -> float | None:
        """Returns the seconds to the first token after `tokens` are prefilled; None if unknown."""
        speed = self.prefill(rank)
        if speed is None or speed.confidence < CONFIDENT:
            return None
        return speed.base_s + speed.token_s * tokens

    def forget_absent(self) -> None:
        """Forgets the ranks of workers that have left. O(ranks)."""
        for worker, of_worker in list(self._lines.items()):
            for dp_rank in [each for each in of_worker if not self._is_there((*worker, each))]:
                del of_worker[dp_rank]
            if not of_worker:
                del self._lines[worker]
        self._regret.forget([rank for rank in self._regret.accounts if not self._is_there(rank)])

    def _is_there(self, rank: Rank) -> bool:
        key, worker_id, dp_rank = rank
        candidates = self._candidates.get(key)
        return candidates is not None and candidates.has_rank(worker_id, dp_rank)
