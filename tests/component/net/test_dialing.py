"""Names: kvd looks them up, checks the addresses, connects by number, and looks them up again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing
import zmq

from kvd.net.dialing import Dialer, Ends, Unreachable
from kvd.net.fetch import FetchError, FetchLimits, fetch
from kvd.net.link import LinkResources
from kvd.net.listener import run_listener
from kvd.net.replay import Replayer
from kvd.wire.egress import parse_networks
from tests.support.listening import HASTY, HASTY_REPLAYS, Listening
from tests.support.loglines import logged
from tests.support.resolving import Names
from tests.support.zmtp_fakes import (
    GREETING,
    Fake,
    Publisher,
    read_exactly,
    ready,
    serve_fake,
    until,
)

LIMITS = FetchLimits(connect_s=1, stall_s=1, total_s=2)
METADATA = "169.254.169.254"


@pytest.fixture
def names() -> Names:
    """Returns a resolver that trio asks from now on; only for use inside of trio."""
    return Names()


@pytest.fixture
def dialer() -> Dialer:
    return Dialer(lookup_s=0.1, lookup_every_s=0.02)


@pytest.fixture
async def resolving(names: Names) -> Names:
    trio.socket.set_custom_hostname_resolver(names)
    return names


@pytest.fixture
def loopback(context: zmq.Context) -> Iterator[Callable[..., Publisher]]:
    """Yields a function that makes publishers at several loopback addresses."""
    with ExitStack() as stack:
        yield lambda endpoint: stack.enter_context(closing(Publisher(context, endpoint)))


Listen = Callable[..., Listening]


@pytest.fixture
def listen(context: zmq.Context, nursery: trio.Nursery, dialer: Dialer) -> Listen:
    def start(
        endpoint: str, replay_endpoint: str | None = None, dialer: Dialer = dialer
    ) -> Listening:
        listening = Listening(endpoint, replay_endpoint)
        listening.ready.set()
        resources = LinkResources(context, dialer)
        replayer = Replayer(resources, HASTY, HASTY_REPLAYS)
        nursery.start_soon(
            run_listener, listening.listener, resources, listening.ready, HASTY, replayer
        )
        return listening

    return start


@pytest.mark.parametrize(
    ("found", "addresses"),
    [
        (["10.0.0.1"], ["10.0.0.1"]),
        (["fd01::1", "10.0.0.1", "10.0.0.2", "10.0.0.1"], ["10.0.0.1", "10.0.0.2", "fd01::1"]),
        ([METADATA, "10.0.0.1", "8.8.8.8"], ["10.0.0.1"]),
        (["::ffff:10.0.0.1"], ["10.0.0.1"]),
        ([METADATA], r"w \(169.254.169.254\) is not in outgoing_allow"),
        (["fe80::1%eth0", "8.8.8.8"], r"w \(fe80::1%eth0, 8.8.8.8\) is not in outgoing_allow"),
        (["::ffff:169.254.169.254"], "is not in outgoing_allow"),
        ([], "is not in outgoing_allow"),
        (None, "w: Name or service not known"),
        (0.0, "w: Temporary failure in name resolution"),
        (60.0, "the lookup of w took longer than 0.1 s"),
    ],
)
async def test_addresses_of_a_name(
    resolving: Names, dialer: Dialer, found: Any, addresses: list[str] | str
) -> None:
    if found is not None:
        resolving.known["w"] = found
    if isinstance(addresses, list):
        assert await dialer.addresses("w") == addresses
        assert dialer.outgoing.refused_connections == 0
        return
    with pytest.raises(Unreachable, match=addresses):
        await dialer.addresses("w")
    assert dialer.outgoing.refused_connections == ("outgoing_allow" in addresses)


@pytest.mark.parametrize(
    ("named", "endpoint"),
    [
        ("tcp://10.0.0.1:05", "tcp://10.0.0.1:5"),
        ("tcp://[FD01::0:1]:5", "tcp://[fd01::1]:5"),
        ("tcp://[::ffff:10.0.0.1]:5", "tcp://10.0.0.1:5"),
        ("tcp://w:5", "tcp://10.0.0.7:5"),
        ("ipc:///run/x", "ipc:///run/x"),
        ("tcp://w:0", None),
        ("tcp://*:5", None),
        ("tcp://169.254.169.254:80", None),
        ("tcp://0x7f.1:80", None),
        ("tcp://8.8.8.8:53", None),
    ],
)
async def test_endpoints(
    resolving: Names, dialer: Dialer, named: str, endpoint: str | None
) -> None:
    """Endpoints without a result are refused; they may have been registered before a reload."""
    resolving.known["w"] = ["10.0.0.7"]
    if endpoint is None:
        with pytest.raises(Unreachable):
            await dialer.endpoint(named)
    else:
        assert await dialer.endpoint(named) == endpoint


async def test_several_addresses_take_turns(resolving: Names, dialer: Dialer) -> None:
    resolving.known["w"] = ["10.0.0.1", "10.0.0.2"]
    turns = [await dialer.endpoint("tcp://w:5", turn) for turn in range(3)]
    assert turns == ["tcp://10.0.0.1:5", "tcp://10.0.0.2:5", "tcp://10.0.0.1:5"]


async def test_ipv6_has_its_turn_where_there_is_nothing_else(
    resolving: Names, dialer: Dialer
) -> None:
    resolving.known |= {"both": ["::1", "127.0.0.1"], "six": ["::1"]}
    assert {await dialer.endpoint("tcp://both:5", turn) for turn in (0, 1)} == {"tcp://127.0.0.1:5"}
    assert await dialer.endpoint("tcp://six:5") == "tcp://[::1]:5"
    with trio.move_on_after(0.1) as waiting:  # there is no other address to move to
        await dialer.moved("tcp://both:5", "tcp://127.0.0.1:5", lambda: False)
    assert waiting.cancelled_caught


async def test_the_machines_own_resolver(listen: Listen, publish: Callable[[], Publisher]) -> None:
    engine = publish()
    listening = listen(engine.endpoint.replace("127.0.0.1", "localhost"))
    await engine.subscribed()
    engine.send(b"a")
    await until(lambda: listening.applied == [b"a"])
    nowhere = listen("tcp://nowhere.invalid:5557")
    await until(nowhere.is_("failed"))
    assert "nowhere.invalid: " in (nowhere.listener.link.last_error or "")


async def test_a_listener_follows_a_pod_that_moves(
    resolving: Names, listen: Listen, loopback: Callable[[str], Publisher]
) -> None:
    first = loopback("tcp://127.0.0.2:0")
    port = first.endpoint.rpartition(":")[2]
    resolving.known["pod"] = ["127.0.0.2"]
    listening = listen(f"tcp://pod:{port}")
    await first.subscribed()
    first.send(b"a")
    await until(lambda: listening.applied == [b"a"])
    asked = resolving.asked
    first.close()
    await until(lambda: not listening.listener.connected)
    del resolving.known["pod"]  # as while a pod is being replaced
    await until(lambda: resolving.asked > asked + 2)
    second = loopback(f"tcp://127.0.0.3:{port}")
    second.seq = 1
    resolving.known["pod"] = ["127.0.0.3"]
    await second.subscribed()
    second.send(b"b")
    await until(lambda: listening.applied == [b"a", b"b"])


async def test_a_name_that_means_a_refused_address_shows_and_is_tried_again(
    resolving: Names, listen: Listen, dialer: Dialer, loopback: Callable[[str], Publisher]
) -> None:
    engine = loopback("tcp://127.0.0.1:0")
    port = engine.endpoint.rpartition(":")[2]
    resolving.known["w"] = [METADATA]
    listening = listen(f"tcp://w:{port}")
    await until(lambda: dialer.outgoing.refused_connections > 2)
    assert listening.listener.status == "failed"
    assert "w (169.254.169.254) is not in outgoing_allow" in (
        listening.listener.link.last_error or ""
    )
    resolving.known["w"] = ["127.0.0.1"]
    await engine.subscribed()
    engine.send(b"a")
    await until(lambda: listening.applied == [b"a"])


async def test_between_check_and_connection_a_name_cannot_change(
    resolving: Names, listen: Listen, loopback: Callable[[str], Publisher]
) -> None:
    """It is looked up once for each connection; a second lookup would give another address."""
    good, evil = loopback("tcp://127.0.0.2:0"), None
    port = good.endpoint.rpartition(":")[2]
    evil = loopback(f"tcp://127.0.0.3:{port}")

    class Rebinding(Names):
        async def getaddrinfo(self, host: Any, *rest: Any) -> Any:
            self.known["w"] = ["127.0.0.2" if self.asked == 0 else "127.0.0.3"]
            return await super().getaddrinfo(host, *rest)

    rebinding = Rebinding()
    trio.socket.set_custom_hostname_resolver(rebinding)
    listening = listen(f"tcp://w:{port}", dialer=Dialer(lookup_s=60, lookup_every_s=60))
    await good.subscribed()
    good.send(b"a")
    await until(lambda: listening.applied == [b"a"])
    assert rebinding.asked == 1
    assert not evil.socket.poll(0)


async def test_a_name_whose_answer_becomes_refused_is_given_up(
    resolving: Names, listen: Listen, dialer: Dialer, loopback: Callable[[str], Publisher]
) -> None:
    engine = loopback("tcp://127.0.0.2:0")
    port = engine.endpoint.rpartition(":")[2]
    resolving.known["w"] = ["127.0.0.2"]
    listening = listen(f"tcp://w:{port}")
    await until(lambda: listening.listener.connected)
    resolving.known["w"] = [METADATA]
    engine.close()
    await until(lambda: listening.listener.status == "failed")
    assert METADATA in (listening.listener.link.last_error or "")


async def test_a_narrower_list_ends_connections(
    listen: Listen, dialer: Dialer, loopback: Callable[[str], Publisher], tmp_path: Path
) -> None:
    kept, lost = loopback("tcp://127.0.0.2:0"), loopback("tcp://127.0.0.3:0")
    local = loopback(f"ipc://{tmp_path}/kv.sock")
    listenings = [listen(each.endpoint) for each in (kept, lost, local)]
    await until(lambda: all(each.listener.connected for each in listenings))
    dialer.outgoing.allow(parse_networks(["127.0.0.2"]))
    await dialer.recheck()
    await until(lambda: [each.listener.connected for each in listenings] == [True, False, False])
    for each, what in zip(listenings[1:], ("127.0.0.3", "ipc"), strict=True):
        assert f"{what} is not in outgoing_allow" in (each.listener.link.last_error or "")
    dialer.outgoing.allow(parse_networks(["private"]))
    await until(lambda: listenings[1].listener.connected)


class Refusing(Dialer, trio.abc.Instrument):
    """Gives its links up once, when a task of that name is about to run."""

    def __init__(self, task_name: str) -> None:
        super().__init__()
        self.wakings = 0  # of the task, until then; 0: never
        self.bugs: list[Exception] = []
        self._task_name = task_name
        self._given: list[Ends] = []

    def watch(self, link: Ends, endpoint: str) -> None:
        super().watch(link, endpoint)
        self._given.append(link)

    def leave(self, link: Ends) -> None:
        super().leave(link)
        self._given.remove(link)

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if not self.wakings or not task.name.endswith(self._task_name):
            return
        self.wakings -= 1
        for link in () if self.wakings else self._given:
            try:
                link.give_up("refused")
            except Exception as bug:  # trio would only log it
                self.bugs.append(bug)


@pytest.mark.parametrize("wakings", [1, 2, 3])
async def test_a_link_may_be_given_up_while_its_listener_ends(
    publish: Callable[[], Publisher], context: zmq.Context, wakings: int
) -> None:
    dialer = Refusing("run_listener")
    trio.lowlevel.add_instrument(dialer)
    listening = Listening(publish().endpoint)
    listening.ready.set()
    resources = LinkResources(context, dialer)
    replayer = Replayer(resources, HASTY, HASTY_REPLAYS)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            run_listener, listening.listener, resources, listening.ready, HASTY, replayer
        )
        await until(lambda: listening.listener.connected)
        dialer.wakings = wakings
        nursery.cancel_scope.cancel()
    assert dialer.bugs == []


async def test_a_link_that_is_given_up_as_it_connects_does_not_stay(
    listen: Listen, nursery: trio.Nursery
) -> None:
    dialer = Refusing("Runs._run")
    trio.lowlevel.add_instrument(dialer)

    async def talk(stream: trio.SocketStream) -> None:
        await stream.send_all(GREETING)
        await read_exactly(stream, len(GREETING) + 2)
        await trio.testing.wait_all_tasks_blocked()
        dialer.wakings = int(fake.connections == 1)
        await stream.send_all(ready())
        await trio.sleep_forever()

    fake: Fake = await nursery.start(serve_fake, talk)
    with logged() as lines:  # its status says so only until the next link is made
        listening = listen(fake.endpoint, dialer=dialer)
        await until(lambda: fake.connections >= 2 and listening.listener.connected)
        (failed,) = (line for line in lines().splitlines() if "event=stream_failed" in line)
    assert f'error="refused: {fake.endpoint}"' in failed


async def test_replays_go_to_checked_addresses_only(
    resolving: Names, context: zmq.Context, nursery: trio.Nursery, listen: Listen, dialer: Dialer
) -> None:
    dealer = Replayer(LinkResources(context, dialer), HASTY, HASTY_REPLAYS)
    listening = Listening("tcp://127.0.0.1:1", "tcp://w:5")
    listening.listener.take(3, b"x")
    resolving.known["w"] = [METADATA]
    assert await dealer.fetch(listening.listener) == "failed"
    assert dialer.outgoing.refused_connections == 1
    listening.listener.replay_endpoint = f"tcp://{METADATA}:80"
    assert await dealer.fetch(listening.listener) == "failed"
    assert dialer.outgoing.refused_connections == 2


# ---- documents of peers


async def fetched(url: str, dialer: Dialer) -> bytes:
    pieces: list[bytes] = []
    await fetch(url, b"*/*", LIMITS, lambda headers: pieces.append, dialer)
    return b"".join(pieces)


async def test_a_document_comes_from_the_checked_address_under_its_name(
    resolving: Names, dialer: Dialer, nursery: trio.Nursery
) -> None:
    requests: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        requests.append(bytes(await stream.receive_some()))
        await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.2")
    port = listeners[0].socket.getsockname()[1]
    nursery.start_soon(trio.serve_listeners, serve, listeners)
    resolving.known["peer"] = [METADATA, "127.0.0.3", "127.0.0.2"]  # nothing listens at the second
    assert await fetched(f"http://peer:{port}/dump", dialer) == b"ok"
    assert f"host: peer:{port}\r\n".encode() in requests[0]
    resolving.known["peer"] = ["127.0.0.3"]
    with pytest.raises(FetchError, match=r": Connection refused$"):
        await fetched(f"http://peer:{port}/dump", dialer)
    resolving.known["peer"] = [METADATA]
    with pytest.raises(FetchError, match="is not in outgoing_allow"):
        await fetched(f"http://peer:{port}/dump", dialer)
    with pytest.raises(FetchError, match="is not in outgoing_allow"):
        await fetched(f"http://{METADATA}:{port}/dump", dialer)
    assert len(requests) == 1


async def test_tls_keeps_the_name(resolving: Names, dialer: Dialer, nursery: trio.Nursery) -> None:
    hellos: list[bytes] = []

    async def serve(stream: trio.SocketStream) -> None:
        hellos.append(bytes(await stream.receive_some()))

    listeners = await trio.open_tcp_listeners(0, host="127.0.0.2")
    port = listeners[0].socket.getsockname()[1]
    nursery.start_soon(trio.serve_listeners, serve, listeners)
    resolving.known["peer.example"] = ["127.0.0.2"]
    with pytest.raises(FetchError):
        await fetched(f"https://peer.example:{port}/dump", dialer)
    assert b"peer.example" in hellos[0]  # server name indication
