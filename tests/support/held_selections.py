"""Selections that wait because all ranks are busy, and their callers."""

from __future__ import annotations

import json
from typing import Any

import trio
import trio.testing

from kvd.errors import KvdError
from kvd.model import PartitionKey
from kvd.selection.options import RouterOptions
from kvd.selection.requests import QueuedRequest
from kvd.selection.worker_record import Role, WorkerRecord
from kvd_core.selector.settings import Settings
from tests.support.selecting import M, Service, worker

BATCH = 100  # tokens
OPTIONS = RouterOptions(Settings(queue_threshold=1.0))


def batched(worker_id: int, key: PartitionKey = M, **members: Any) -> WorkerRecord:
    return worker(worker_id, key, max_num_batched_tokens=BATCH, **members)


async def ready(*records: WorkerRecord, options: RouterOptions = OPTIONS, **bounds: int) -> Service:
    service = Service(options, **bounds)
    for record in records:
        assert (await service.selections.workers.put(record)).reasons == []
    return service


class Caller:
    """A client whose selection is held."""

    def __init__(self, service: Service, held: QueuedRequest) -> None:
        assert isinstance(held, QueuedRequest)
        self._service = service
        self.held = held
        self.answer: Any = None
        self.error: KvdError | None = None
        self.scope = trio.CancelScope()

    async def run(self) -> None:
        with self.scope:
            try:
                self.answer = json.loads(await self._service.selections.scheduler.wait(self.held))
            except KvdError as error:
                self.error = error


def calls(nursery: trio.Nursery, service: Service, blocks: list[int], **members: Any) -> Caller:
    caller = Caller(service, service.select(blocks, **members))
    nursery.start_soon(caller.run)
    return caller


settled = trio.testing.wait_all_tasks_blocked


async def disaggregated(options: RouterOptions = OPTIONS) -> Service:
    """Returns a service with prefill workers 1 and 2, and decode workers 3 and 4."""
    return await ready(
        batched(1, role=Role.PREFILL),
        batched(2, role=Role.PREFILL),
        batched(3, role=Role.DECODE),
        batched(4, role=Role.DECODE),
        options=options,
    )
