"""CURVE between real sockets: engines, replay servers, replicas, with right, wrong or no keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest
import trio
import zmq

from kvd.errors import BadRequest, Conflict
from kvd.net.curve import KeyPair, ZapAuthenticator
from kvd.net.dialing import Dialer
from kvd.net.link import LinkResources
from kvd.net.listener import run_listener
from kvd.net.publisher import open_publisher
from kvd.net.replay import Replayer
from kvd.net.replication import Replication
from kvd.replica_sync.replicas import Replicas
from kvd.wire.curve import check_server_key, parse_keys, parse_secret
from kvd.wire.replica import ReplicaStats
from tests.support.listening import HASTY, HASTY_REPLAYS, Listening
from tests.support.replicating import HASTY_REPLICA, Ledger, add, new_router_id
from tests.support.zmtp_fakes import Publisher, until

PUBLIC, SECRET = (key.decode() for key in zmq.curve_keypair())
OTHER_PUBLIC, OTHER_SECRET = (key.decode() for key in zmq.curve_keypair())


def serving(secret: str) -> dict[int, int | bytes]:
    """Returns options that make a socket a CURVE server for any client."""
    return {zmq.CURVE_SERVER: 1, zmq.CURVE_SECRETKEY: secret.encode()}


class Engine(Publisher):
    """A publisher that speaks CURVE if it has a key."""

    def __init__(self, context: zmq.Context, secret: str | None) -> None:
        super().__init__(context)
        self.socket.unbind(self.endpoint)
        for option, value in serving(secret).items() if secret else ():
            self.socket.set(option, value)
        self.socket.bind("tcp://127.0.0.1:*")
        self.endpoint = self.socket.last_endpoint.decode()


@pytest.fixture
def engine(context: zmq.Context) -> Iterator[Callable[[str | None], Engine]]:
    with ExitStack() as stack:
        yield lambda secret: stack.enter_context(closing(Engine(context, secret)))


Listen = Callable[..., Listening]


@pytest.fixture
def listen(context: zmq.Context, nursery: trio.Nursery) -> Listen:
    def start(endpoint: str, server_key: str | None, keys: KeyPair | None = None) -> Listening:
        listening = Listening(endpoint)
        listening.listener.server_key = server_key
        listening.ready.set()
        resources = LinkResources(context, Dialer(keys=keys))
        replayer = Replayer(resources, HASTY, HASTY_REPLAYS)
        arguments = listening.listener, resources, listening.ready, HASTY, replayer
        nursery.start_soon(run_listener, *arguments)
        return listening

    return start


@pytest.mark.parametrize("keys", [None, KeyPair(OTHER_SECRET)], ids=["made", "given"])
async def test_the_right_key(
    listen: Listen, engine: Callable[[str | None], Engine], keys: KeyPair | None
) -> None:
    there = engine(SECRET)
    listening = listen(there.endpoint, PUBLIC, keys)
    await there.subscribed()
    there.send(b"a", b"b")
    await until(lambda: listening.applied == [b"a", b"b"])


@pytest.mark.parametrize(
    ("secret", "server_key", "error"),
    [
        (SECRET, OTHER_PUBLIC, "handshake failed"),
        (SECRET, None, "protocol error in the handshake"),
        (None, PUBLIC, "the other end does not speak CURVE"),
    ],
    ids=["wrong", "missing", "plain publisher"],
)
async def test_other_keys_get_nothing_and_the_status_says_so(
    listen: Listen,
    engine: Callable[[str | None], Engine],
    secret: str | None,
    server_key: str | None,
    error: str,
) -> None:
    there = engine(secret)
    listening = listen(there.endpoint, server_key)
    await until(lambda: listening.listener.link.last_error)
    there.send(*[b"x"] * 20)
    # If the other end hangs up first, kvd sees only a failed handshake.
    seen = (listening.listener.link.last_error or "").removesuffix(f": {there.endpoint}")
    assert seen in (error, "handshake failed")
    assert listening.listener.status in ("pending", "failed")
    assert not listening.listener.connected and not listening.applied
    assert not there.socket.poll(50)  # no subscription has come


@pytest.mark.parametrize(
    ("server_key", "ended"),
    [(PUBLIC, "marker"), (OTHER_PUBLIC, "silent")],
    ids=["same", "other"],
)
async def test_replays_have_the_same_key(
    context: zmq.Context, nursery: trio.Nursery, server_key: str, ended: str
) -> None:
    with context.socket(zmq.ROUTER) as router:
        router.linger = 0
        for option, value in serving(SECRET).items():
            router.set(option, value)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        async def answer() -> None:
            for numbers in ((0, 1), ()):  # the second request asks for number 2 again
                await until(lambda: router.poll(0))
                who, empty, _ = router.recv_multipart()
                for number in numbers:
                    router.send_multipart([who, empty, number.to_bytes(8), b"%d" % number])
                router.send_multipart([who, empty, (2**64 - 1).to_bytes(8), b""])

        if ended == "marker":
            nursery.start_soon(answer)
        listening = Listening("tcp://127.0.0.1:1", f"tcp://127.0.0.1:{port}")
        listening.listener.server_key = server_key
        listening.listener.take(3, b"x")
        replayer = Replayer(LinkResources(context), HASTY, HASTY_REPLAYS)
        assert await replayer.fetch(listening.listener) == ended
        assert listening.applied == ([b"0", b"1"] if ended == "marker" else [])


# ---- replicas


@dataclasses.dataclass
class Process:
    """One process on the replica plane."""

    ledger: Ledger
    plane: Replication
    replicas: Replicas
    endpoint: str


async def start_process(
    nursery: trio.Nursery, context: zmq.Context, secret: str | None, keys: set[str] | None
) -> tuple[Process, ZapAuthenticator | None]:
    pair = None if secret is None else KeyPair(secret)
    authenticator, curve = None, {}
    if pair is not None and keys is not None:
        authenticator, curve = ZapAuthenticator(context, keys), pair.server()
        nursery.start_soon(authenticator.run)
    publisher = await open_publisher(context, "127.0.0.1", 0, HASTY_REPLICA, curve)
    ledger, stats = Ledger(), ReplicaStats()
    resources = LinkResources(context, Dialer(keys=pair))
    plane = Replication(
        nursery, resources, publisher, ledger.apply, stats, new_router_id(), HASTY_REPLICA
    )
    return (
        Process(ledger, plane, Replicas(plane, stats), publisher.endpoints[0]),
        authenticator,
    )


@pytest.fixture
def contexts() -> Iterator[Callable[[], zmq.Context]]:
    made: list[zmq.Context] = []

    def make() -> zmq.Context:
        made.append(zmq.Context())
        return made[-1]

    yield make
    for each in made:
        each.destroy(linger=0)


async def test_replicas_with_keys_hear_each_other_and_nobody_else_does(
    contexts: Callable[[], zmq.Context], nursery: trio.Nursery
) -> None:
    speaker, authenticator = await start_process(nursery, contexts(), SECRET, {OTHER_PUBLIC})
    assert authenticator is not None
    good, _ = await start_process(nursery, contexts(), OTHER_SECRET, None)
    unlisted, _ = await start_process(nursery, contexts(), None, None)  # makes its own key
    plain, _ = await start_process(nursery, contexts(), None, None)
    assert good.replicas.register(speaker.endpoint, PUBLIC)
    assert unlisted.replicas.register(speaker.endpoint, PUBLIC)
    assert plain.replicas.register(speaker.endpoint)

    def heard() -> bool:
        speaker.plane.publish(add("r"))
        return bool(good.ledger.seen)

    await until(heard)
    await until(lambda: authenticator.refused > 0)

    def error(process: Process) -> str:
        return next(iter(process.replicas.all())).last_error or ""

    await until(lambda: "authentication failed in the handshake" in error(unlisted))
    await until(lambda: "handshake" in error(plain))
    assert not unlisted.ledger.seen and not plain.ledger.seen


async def test_the_list_of_keys_can_be_changed(
    contexts: Callable[[], zmq.Context], nursery: trio.Nursery
) -> None:
    speaker, authenticator = await start_process(nursery, contexts(), SECRET, set())
    assert authenticator is not None
    other, _ = await start_process(nursery, contexts(), OTHER_SECRET, None)
    other.replicas.register(speaker.endpoint, PUBLIC)
    await until(lambda: authenticator.refused > 1)
    authenticator.keys = frozenset({OTHER_PUBLIC})
    await until(lambda: next(iter(other.replicas.all())).connected)


async def test_without_a_authenticator_nobody_is_let_in(
    contexts: Callable[[], zmq.Context], nursery: trio.Nursery
) -> None:
    publisher = await open_publisher(
        contexts(), "127.0.0.1", 0, HASTY_REPLICA, KeyPair(SECRET).server()
    )
    nursery.start_soon(publisher.run)
    other, _ = await start_process(nursery, contexts(), OTHER_SECRET, None)
    other.replicas.register(publisher.endpoints[0], PUBLIC)
    await until(lambda: next(iter(other.replicas.all())).last_error)
    assert not next(iter(other.replicas.all())).connected


async def test_a_replica_has_one_key(
    contexts: Callable[[], zmq.Context], nursery: trio.Nursery
) -> None:
    process, _ = await start_process(nursery, contexts(), None, None)
    assert process.replicas.register("tcp://127.0.0.1:1", PUBLIC)
    assert not process.replicas.register("tcp://127.0.0.1:1", PUBLIC)
    for key in (None, OTHER_PUBLIC):
        with pytest.raises(Conflict):
            process.replicas.register("tcp://127.0.0.1:1", key)


# ---- keys as texts


@pytest.mark.parametrize("key", ["", "x" * 39, "x" * 41, "x" * 39 + " ", "x" * 39 + "\n", "ü" * 40])
def test_what_no_key_looks_like(key: str) -> None:
    with pytest.raises(BadRequest, match="curve_server_key"):
        check_server_key(key)
    with pytest.raises(ValueError, match=r"^expected the 40 characters of a secret key"):
        parse_secret(key * 2)


def test_files_of_keys() -> None:
    assert parse_secret(f"{SECRET}\n") == SECRET
    text = f"# who may subscribe\n\n{PUBLIC} replica 1\n  {OTHER_PUBLIC}\n#\n"
    assert parse_keys(text) == {PUBLIC, OTHER_PUBLIC}
    assert parse_keys("#" * 40) == {"#" * 40}
    with pytest.raises(ValueError, match=r"^line 2: expected"):
        parse_keys(f"{PUBLIC}\nwrong\n")
