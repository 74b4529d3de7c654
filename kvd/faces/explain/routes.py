"""The routes of explanations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import trio

from kvd.errors import BadRequest, NotFound
from kvd.faces.common import bodies
from kvd.faces.common.paths import EXPLAIN_PATH
from kvd.faces.explain.answers import ExplanationWriter, chronicled, heading
from kvd.faces.explain.questions import ExplainRequest, of_request, read
from kvd.faces.explain.traces import NOTHING, TracedRank, find_traces
from kvd.http.limits import LONG_BODY_LIMIT
from kvd.http.messages import Request, Response
from kvd.http.routes import ConcurrencyLimit, Route, Scope
from kvd.index.partitions import Partition, State
from kvd.selection.service import Selections
from kvd.selection.weighing import Weighed

# Explanations written at a time, over all faces: each takes some milliseconds, in slices, and holds
# some megabytes for a prompt of a million tokens.
MAX_EXPLANATIONS = 4


@dataclass(frozen=True, slots=True)
class Explainer:
    """Explains choices from what the daemon knows."""

    state: State
    selections: Selections

    async def explain(self, request: Request) -> Response:
        """Answers which rank would be chosen for a prompt, and why; raises as /select does.

        For a model without workers to choose from, it answers what the ranks of its index cache.
        """
        return await self._answer(read(request, self.state, self.selections))

    async def explain_request(self, request: Request) -> Response:
        """Answers the same for a live request; the query names it, so that pages can link here."""
        request_id = bodies.parameters(request, "request_id").get("request_id")
        if request_id is None:
            raise BadRequest("the parameter `request_id` is missing")
        return await self._answer(of_request(request_id, self.state, self.selections))

    async def _answer(self, question: ExplainRequest) -> Response:
        # With a million tokens each step takes 10 to 20 ms: other tasks run in between.
        await trio.lowlevel.checkpoint()
        weighed = self._weigh(question)
        partition = self.state.partitions.get(question.key)
        if weighed and not self.selections.options.uses_kv_events:
            partition = None  # what ranks cache is not announced, but predicted
        if partition is None and not weighed:
            partition = self._partition(question)
        size = self._block_size(question, partition)
        await trio.lowlevel.checkpoint()
        prompt = question.prompt(size, partition)
        await trio.lowlevel.checkpoint()
        traces = NOTHING
        if partition is not None and partition.block_size == size:
            ranks = _ranks(weighed) or list(partition.rank_keys())
            traces = await find_traces(self.state, partition, question, prompt, ranks)
        now = self.selections.clock()
        writer = ExplanationWriter(prompt, traces, now)
        answer = heading(question, prompt, size, now)
        stream = partial(self.selections.chooser.stream, question.key)
        answer["choices"] = [writer.choice(each) for each in weighed] or [writer.unchosen(stream)]
        answer |= writer.events()
        answer["chronicle"] = chronicled(self.state.chronicle, now)
        return bodies.json_response(answer)

    def _partition(self, question: ExplainRequest) -> Partition:
        """Returns what the index has of the model; raises NotFound, which the doctor ignores."""
        try:
            return self.state.partition(*question.key)
        except NotFound as failure:
            failure.counts_as_unknown = False
            raise

    def _weigh(self, question: ExplainRequest) -> list[Weighed]:
        """Returns how ranks would be chosen, for each phase; none where there are no workers."""
        candidates = self.selections.candidates.get(question.key)
        if candidates is None or not candidates.workers:
            return []
        return self.selections.chooser.weigh(question.selection, question.lookup)

    def _block_size(self, question: ExplainRequest, partition: Partition | None) -> int:
        candidates = self.selections.candidates.get(question.key)
        size = None if candidates is None else candidates.block_size
        if size is None:
            assert partition is not None
            return partition.block_size
        return size


def _ranks(weighed: list[Weighed]) -> list[TracedRank]:
    return [(each.row.worker_id, each.row.dp_rank) for each in weighed[0].ranks] if weighed else []


def explain_routes(explainer: Explainer, explanations: ConcurrencyLimit) -> tuple[Route, ...]:
    return (
        Route("GET", EXPLAIN_PATH, explainer.explain_request, admission=explanations),
        Route(
            "POST",
            EXPLAIN_PATH,
            explainer.explain,
            body_limit=LONG_BODY_LIMIT,
            admission=explanations,
            scope=Scope.READ,
        ),
    )


def explanations_bound() -> ConcurrencyLimit:
    """Returns the limit on explanations that all faces of a process share."""
    return ConcurrencyLimit(
        MAX_EXPLANATIONS, f"the limit of {MAX_EXPLANATIONS} concurrent explanations is reached"
    )
