"""Fixtures of these tests: a ZMQ context, publishers and listeners, closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import trio
import zmq

from kvd.net.link import LinkOptions
from kvd.net.zsocket import make_context
from tests.support.listening import HASTY, Listening
from tests.support.zmtp_fakes import Publisher


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made = make_context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def publish(context: zmq.Context) -> Iterator[Callable[..., Publisher]]:
    """Returns a function that makes publishers, which end with the test."""
    with ExitStack() as stack:
        yield lambda *endpoint: stack.enter_context(closing(Publisher(context, *endpoint)))


@pytest.fixture
def listen(context: zmq.Context, nursery: trio.Nursery) -> Callable[..., Listening]:
    """Returns a function that starts listeners, by default with an open gate."""

    def start(endpoint: str, gate: bool = True, options: LinkOptions = HASTY) -> Listening:
        listening = Listening(endpoint)
        if gate:
            listening.ready.set()
        nursery.start_soon(listening.run, context, options)
        return listening

    return start
