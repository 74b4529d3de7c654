"""A listener whose engine is another process, which is stopped and continued."""

from __future__ import annotations

import signal
from contextlib import closing

import trio

from kvd.net.zsocket import make_context
from tests.support.listening import HASTY, Listening
from tests.support.zmtp_fakes import ChildPublisher, until


async def test_a_frozen_worker_is_noticed_and_welcomed_back(nursery: trio.Nursery) -> None:
    context = make_context()
    with closing(ChildPublisher()) as worker:
        listening = Listening(worker.endpoint)
        listening.ready.set()
        nursery.start_soon(listening.run, context, HASTY)
        listener = listening.listener
        await until(lambda: listener.connected)
        worker.process.send_signal(signal.SIGSTOP)
        await until(lambda: not listener.connected)
        assert (listener.status, listener.stats.failures) == ("active", 0)
        worker.process.send_signal(signal.SIGCONT)
        await until(lambda: listener.connected)
        await listening.stop()
    context.destroy(linger=0)
