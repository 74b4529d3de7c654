"""A simulated engine: a queue, one prefill at a time, a batch of decoding requests.

    arrivals ──> waiting ──> prefilling ──────────────> decoding (batch) ──> done
                  FIFO       chunks of a step's budget    one token a step

A step takes  step_s + step_s_per_request * batch + step_s_per_token * tokens of the blocks in use,
as decoding reads all of these. While a prefill is under way, each step also does one chunk of it,
and takes  chunk / prefill_tokens_per_s  longer. Between two events none of this changes, so
progress is linear and nothing is computed step by step. Prefilling a token costs the same at the
end of a long prompt as at its start.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import inf

from kvd.replay.cache import Cache, CacheLease
from kvd.replay.recording import RecordedRequest


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of an engine."""

    prefill_tokens_per_s: float = 10_000.0
    chunk_tokens: int = 2048  # prefilled in each step, beside decoding
    step_s: float = 0.015
    step_s_per_request: float = 0.0001
    step_s_per_token: float = 0.00001 / 512  # per token in use: 330 kB, read at 16 TB/s
    max_batch: int = 256  # requests

    def times(self, factor: float) -> Speed:
        """Returns the speed of an engine that does everything `factor` times as fast."""
        return replace(
            self,
            prefill_tokens_per_s=self.prefill_tokens_per_s * factor,
            step_s=self.step_s / factor,
            step_s_per_request=self.step_s_per_request / factor,
            step_s_per_token=self.step_s_per_token / factor,
        )


@dataclass(slots=True, eq=False)
class Job:
    """A request on its engine."""

    request: RecordedRequest
    prefill_starts_s: float = inf
    first_token_s: float = inf
    done_s: float = inf
    hit_tokens: int = 0
    to_prefill: float = 0.0
    lease: CacheLease | None = None


@dataclass(eq=False, slots=True)
class Engine:
    """Serves jobs in order of arrival; all times are simulated seconds."""

    cache: Cache
    block_size: int  # tokens
    speed: Speed
    prefilled: Callable[[Job], None]  # called when a request's first token has come
    finished: Callable[[Job], None]  # called when its last token has come
    now: float = 0.0
    busy_s: float = 0.0
    prefilled_tokens: int = 0
    steps: float = 0.0  # taken since the start
    waiting: deque[Job] = field(default_factory=deque)
    prefilling: Job | None = None
    decoding: list[tuple[float, int, Job]] = field(default_factory=list)  # a heap by last step
    _arrivals: int = 0

    @property
    def live(self) -> int:
        """Returns how many requests wait or run."""
        return len(self.waiting) + (self.prefilling is not None) + len(self.decoding)

    def submit(self, request: RecordedRequest, now: float) -> Job:
        self._advance(now)
        job = Job(request)
        self.waiting.append(job)
        self._begin()
        return job

    def due_s(self) -> float:
        """Returns when the next prefill or request will end; infinity while idle."""
        prefill, decode = self._due()
        return self.now + min(prefill, decode)

    def work(self, now: float) -> None:
        """Ends the prefill or request that is due at `now`, the time that `due_s` returned."""
        prefill, decode = self._due()
        self._advance(now)
        if decode <= prefill:
            self._finish(heapq.heappop(self.decoding)[2])
        else:
            self._end_prefill()
        self._begin()

    # ---- progress

    def _step_s(self) -> float:
        batch = len(self.decoding)
        speed, step_s = self.speed, 0.0
        if batch:
            step_s = speed.step_s + speed.step_s_per_request * batch
            step_s += speed.step_s_per_token * self.block_size * self.cache.in_use
        if self.prefilling is not None:
            step_s += speed.chunk_tokens / speed.prefill_tokens_per_s
        return step_s

    def _due(self) -> tuple[float, float]:
        """Returns the seconds until the prefill ends, and until the next request does."""
        step_s = self._step_s()
        prefill = decode = inf
        if self.prefilling is not None:
            prefill = self.prefilling.to_prefill / self.speed.chunk_tokens * step_s
        if self.decoding:
            decode = max(0.0, self.decoding[0][0] - self.steps) * step_s
        return prefill, decode

    def _advance(self, now: float) -> None:
        step_s = self._step_s()
        if step_s:
            steps = (now - self.now) / step_s
            self.busy_s += now - self.now
            self.steps += steps
            if self.prefilling is not None:
                self.prefilling.to_prefill -= steps * self.speed.chunk_tokens
        self.now = now

    # ---- from one step to the next

    def _begin(self) -> None:
        """Starts the prefill of the first waiting request, if there is room for it."""
        if self.prefilling is not None or not self.waiting:
            return
        if len(self.decoding) >= self.speed.max_batch:
            return
        job = self.waiting[0]
        request = job.request
        usable = request.blocks[: (request.input_tokens - 1) // self.block_size]
        cached = usable[: self.cache.held(usable)]
        blocks = -(-(request.input_tokens + request.output_tokens) // self.block_size)
        job.lease = self.cache.lease(cached, blocks - len(cached), self.now)
        if job.lease is None:
            if not self.decoding:
                raise ValueError(f"{request.name} needs more blocks than an engine has: {blocks}")
            return
        self.waiting.popleft()
        job.prefill_starts_s = self.now
        job.hit_tokens = len(cached) * self.block_size
        job.to_prefill = request.input_tokens - job.hit_tokens
        self.prefilled_tokens += request.input_tokens - job.hit_tokens
        self.prefilling = job

    def _end_prefill(self) -> None:
        job = self.prefilling
        assert job is not None and job.lease is not None
        self.prefilling = None
        job.first_token_s = self.now
        self.cache.store(job.lease, job.request.blocks, self.now)
        self.prefilled(job)
        if job.request.output_tokens <= 1:
            self._finish(job)
            return
        self._arrivals += 1
        last = self.steps + job.request.output_tokens - 1
        heapq.heappush(self.decoding, (last, self._arrivals, job))

    def _finish(self, job: Job) -> None:
        assert job.lease is not None
        job.done_s = self.now
        self.cache.release(job.lease)
        self.finished(job)
