"""The last minutes of the picture, in rings that are filled only while somebody reads it.

    read ──> wakes the task ──> a sample every SAMPLE_S ──> nobody has read for SAMPLED_S: all is
                                                            forgotten, nothing is subscribed to

    POINTS   |  .  .  |  .  .  |     requests/s, events/s, live, queued, shares: of all
             |  .  .  |  .  .  |     live requests, share of cached tokens: of each rank, MAX_RANKS
    MAX_DECISIONS                    choices, as in the decision log

Where choices are very many, shares are those of a sample (kvd/slots/live_requests.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from kvd.model import RankKey
from kvd.selection.decisions import outcome
from kvd.selection.service import Selections
from kvd.slots.live_requests import Moment
from kvd.wire.lifecycle import Step

SAMPLE_S = 2.0  # seconds between two samples
POINTS = 60  # samples kept: two minutes
# Seconds after the last read at which sampling ends: longer than browsers delay the timers of a
# page in the background.
SAMPLED_S = 70.0
MAX_DECISIONS = 32  # last choices shown, 0.5 kB each
MAX_RANKS = 256  # ranks with a row and a history, 30 numbers and 2 kB each


class Sums(NamedTuple):
    """Totals since the start; `live` and `queued` are numbers at one moment."""

    requests: int
    events: int
    questions: int
    matched: int
    prompt_tokens: int
    cached_tokens: int
    live: int
    queued: int


Series = deque[float | None]


def _series() -> Series:
    return deque(maxlen=POINTS)


@dataclass(slots=True)
class Curves:
    """Curves of all ranks together; a share of nothing is None."""

    requests_per_s: Series = field(default_factory=_series)
    events_per_s: Series = field(default_factory=_series)
    live: Series = field(default_factory=_series)
    queued: Series = field(default_factory=_series)
    matched_share: Series = field(default_factory=_series)
    cached_share: Series = field(default_factory=_series)


@dataclass(slots=True)
class RankCurves:
    """Curves of one rank."""

    requests: Series = field(default_factory=_series)
    cached_share: Series = field(default_factory=_series)


Load = Callable[[RankKey], int | None]  # a rank's live requests


class History:
    """The samples of the last minutes."""

    def __init__(
        self,
        selections: Selections,
        sums: Callable[[], Sums],
        ranks: Callable[[], Iterable[RankKey]],
        load: Load,
    ) -> None:
        """`ranks` returns the first MAX_RANKS ranks, `load` the live requests of one."""
        self._selections = selections
        self._sums = sums
        self._ranks = ranks
        self._load = load
        self._wanted_at = 0.0  # monotonic seconds
        self._wanted = trio.Event()
        self._last: tuple[float, Sums] | None = None
        self._forget()

    def _forget(self) -> None:
        self.curves = Curves()
        self.by_rank: dict[RankKey, RankCurves] = {}
        self.decisions: deque[tuple[float, dict[str, object]]] = deque(maxlen=MAX_DECISIONS)
        # Cached tokens and prompt tokens of choices since the last sample.
        self._chosen: dict[RankKey, tuple[int, int]] = {}
        self._last = None

    def keep_sampling(self) -> None:
        """Makes `run` take samples for SAMPLED_S from now on."""
        self._wanted_at = trio.current_time()
        self._wanted.set()

    async def run(self) -> None:
        """Takes samples while the picture is read, until it is cancelled."""
        while True:
            await self._wanted.wait()
            moments = self._selections.reservations.moments
            moments.subscribe(self._note)
            while trio.current_time() - self._wanted_at < SAMPLED_S:
                self._sample(trio.current_time())
                await trio.sleep(SAMPLE_S)
            moments.unsubscribe(self._note)
            self._forget()
            self._wanted = trio.Event()

    def _note(self, moment: Moment) -> None:
        """Notes a choice that was made here, not on a replica."""
        live = moment.live
        if moment.step is not Step.ADD or live is None or moment.mirrored:
            return
        made = outcome(moment, live, self._selections.candidates[moment.key])
        self.decisions.append((moment.time, made))
        key = RankKey(moment.key, live.worker_id, live.dp_rank)
        cached, prompt = self._chosen.get(key, (0, 0))
        found, left = made["cached_tokens"], made["prefill_tokens"]
        assert isinstance(found, int) and isinstance(left, int)
        self._chosen[key] = cached + found, prompt + found + left

    def _sample(self, now: float) -> None:
        sums, last = self._sums(), self._last
        self._last = now, sums
        if last is None:
            return
        before, seconds = last[1], max(now - last[0], 1e-3)
        curves = self.curves
        curves.requests_per_s.append(_rounded((sums.requests - before.requests) / seconds))
        curves.events_per_s.append(_rounded((sums.events - before.events) / seconds))
        curves.live.append(sums.live)
        curves.queued.append(sums.queued)
        asked, prompts = sums.questions - before.questions, sums.prompt_tokens
        curves.matched_share.append(_share(sums.matched - before.matched, asked))
        cached = sums.cached_tokens - before.cached_tokens
        curves.cached_share.append(_share(cached, prompts - before.prompt_tokens))
        self._sample_ranks()

    def _sample_ranks(self) -> None:
        known, self.by_rank = self.by_rank, {}
        for key in self._ranks():
            curves = self.by_rank[key] = known.get(key) or RankCurves()
            curves.requests.append(self._load(key))
            curves.cached_share.append(_share(*self._chosen.get(key, (0, 0))))
        self._chosen.clear()


def _rounded(rate: float) -> float:
    return round(max(0.0, rate), 1)


def _share(part: int, whole: int) -> float | None:
    return round(min(1.0, max(0.0, part / whole)), 3) if whole > 0 else None
