"""Measures how long a snapshot of the index holds the loop, as it is written and as it is restored.

    python bench/snapshot_steps.py [--blocks 1000000]

16 ranks hold the blocks: either each rank has prompts of its own, or all have the same prompts, but
each under engine hashes of its own, as with vLLM's engines. In this process a snapshot is written
three times, and restored three times into an empty index. Each step of the loop is timed by the CPU
time of its thread, which other work on the machine does not disturb.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgpack
import trio

from kvd.index.partitions import State
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.index.restore import bring_in, planned_of
from kvd.model import PartitionKey, RankKey
from kvd.net.link import LinkOptions, LinkResources
from kvd.net.listeners import ListenerTasks
from kvd.net.zsocket import make_context
from kvd.persistence import snapshot
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import StateDirectory
from kvd.persistence.frames import Content, Header

RANKS, BLOCK_SIZE, BATCH_BLOCKS, ROUNDS = 16, 16, 64, 3


class Steps(trio.abc.Instrument):
    """Notes the CPU seconds of each step of the loop."""

    def __init__(self) -> None:
        self.took: list[float] = []
        self._began: float | None = None  # None: still in the step that created this object

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if self._began is not None:
            self.took.append(time.thread_time() - self._began)


def batch(rank: int, number: int, prompt: int) -> bytes:
    first = (rank * 1_000_000 + number) * BATCH_BLOCKS
    hashes = list(range(first + 1, first + BATCH_BLOCKS + 1))
    tokens = [(prompt * 7919 + each * 31) & 0x3FFFFFFF for each in range(BATCH_BLOCKS * BLOCK_SIZE)]
    event = ["BlockStored", hashes, None, tokens, BLOCK_SIZE, None]
    payload: bytes = msgpack.packb([0.0, [event], 0])
    return payload


def filled(blocks: int, is_shared: bool) -> State:
    state, key = State(), PartitionKey("m", "default")
    batches = blocks // RANKS // BATCH_BLOCKS
    for rank in range(RANKS):
        stream = state.add_rank(RankKey(key, rank + 1, 0), BLOCK_SIZE)
        for number in range(batches):
            stream.apply(batch(rank, number, number if is_shared else rank * batches + number))
    return state


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Prints how long the steps of the loop within the context took."""
    gc.collect()  # now, or a timed step would free an earlier index, which takes milliseconds
    gc.freeze()
    steps = Steps()
    trio.lowlevel.add_instrument(steps)
    try:
        yield
    finally:
        trio.lowlevel.remove_instrument(steps)
    took = sorted(each * 1e3 for each in steps.took)
    p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
    print(
        f"{title:36} {len(took):6} steps: p50 {p50:.2f}, p99 {p99:.2f}, longest {took[-1]:.2f} ms",
        flush=True,
    )


async def measure(title: str, state: State, folder: Path) -> None:
    async with trio.open_nursery() as nursery:
        context = make_context()
        tasks = ListenerTasks(nursery, LinkResources(context), trio.Event(), LinkOptions())
        listened = Registry(state, tasks), Publishers(state, tasks)
        directory = StateDirectory(folder)
        with timed(f"written, {title}"):
            for _ in range(ROUNDS):
                await trio.lowlevel.checkpoint()
                header = Header(Content.INDEX, "bench", ClockReading.now(trio.current_time()))
                await snapshot.write(directory, header, state, *listened)
        restored = [State() for _ in range(ROUNDS)]  # kept, so that none is freed in a timed step
        with timed(f"restored, {title}"):
            for again in restored:
                await trio.lowlevel.checkpoint()
                found = await snapshot.read(directory.file(Content.INDEX))
                again.begin_recovery()
                await bring_in(again, await planned_of(again, found.entries), lambda _: None)
                again.end_recovery()
        directory.close()
        context.destroy(linger=0)
        nursery.cancel_scope.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1_000_000)
    blocks = parser.parse_args().blocks
    for title, is_shared in (("prompts of their own", False), ("the same, by other names", True)):
        with tempfile.TemporaryDirectory() as folder:
            trio.run(measure, title, filled(blocks, is_shared), Path(folder))


if __name__ == "__main__":
    main()
