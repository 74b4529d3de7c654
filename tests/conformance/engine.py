"""The wire side of an engine: it publishes batches and answers replay requests."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import msgpack
import zmq

from tests.conformance.failure import BadScenario, Failure, wait_until
from tests.support.ports import find_free_port

DEFAULT_TOPIC = "kv-events"
SUBSCRIPTION_WITHIN_S = 10.0
REBIND_WITHIN_S = 5.0  # the kernel may keep a port for a moment after its socket closed
LINGER_MS = 200  # batches published before an engine dies are still sent
REPLAY_POLL_MS = 20
END_OF_REPLAY = b"\xff" * 8
SUBSCRIBED, UNSUBSCRIBED = b"\x01", b"\x00"


def pack(value: Any) -> bytes:
    """Returns the msgpack of a batch that is written as JSON (FORMAT.md)."""
    packed: bytes = msgpack.packb(_unescape(value), use_bin_type=True)
    return packed


def _unescape(value: Any) -> Any:
    if isinstance(value, list):
        return [_unescape(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {"$bytes"}:
            return bytes.fromhex(value["$bytes"])
        if value.keys() == {"$f"}:
            return float(value["$f"])
        return {name: _unescape(item) for name, item in value.items()}
    return value


class Engine:
    """One engine; it keeps its ports through several lives, each from `bind` to `unbind`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode = "normal"  # or "silent" or "end_only": how replay requests are answered
        self.requests: list[list[str]] = []  # replay requests, their frames as hex
        self._ports: dict[str, int] = {}
        self._subscriptions: list[bytes] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._publisher: zmq.Socket[bytes]
        self._buffer: deque[tuple[int, bytes]] = deque()
        self._lock = threading.Lock()  # guards the buffer
        self._stop = threading.Event()
        self._replayer: threading.Thread | None = None

    def endpoint(self, part: str) -> str:
        """Returns the endpoint of `pub` or `replay`, chosen now if the engine is not bound yet."""
        if part not in self._ports:
            self._ports[part] = find_free_port()
        return f"tcp://127.0.0.1:{self._ports[part]}"

    def reserve(self) -> None:
        self.endpoint("pub")
        self.endpoint("replay")

    def bind(self, replay: bool = False, buffer: int = 10_000) -> None:
        if self._context is not None:
            raise BadScenario(f"engine {self.name} is bound already")
        self._context = zmq.Context()
        self._publisher = self._bind(zmq.XPUB, "pub")  # a PUB that receives subscriptions
        self._publisher.set(zmq.SNDHWM, 0)
        self._publisher.set(zmq.XPUB_VERBOSER, 1)
        self._buffer = deque(maxlen=buffer)
        self._stop.clear()
        if replay:
            router = self._bind(zmq.ROUTER, "replay")
            self._replayer = threading.Thread(target=self._answer_requests, args=(router,))
            self._replayer.start()

    def unbind(self) -> None:
        if self._context is None:
            return
        self._stop.set()
        if self._replayer is not None:
            self._replayer.join()
            self._replayer = None
        self._publisher.close(LINGER_MS)
        self._context.term()
        self._context = None
        self._subscriptions.clear()

    def _bind(self, kind: int, part: str) -> zmq.Socket[bytes]:
        assert self._context is not None
        made = self._context.socket(kind)
        if part not in self._ports:
            self._ports[part] = made.bind_to_random_port("tcp://127.0.0.1")
            return made

        def try_to_bind() -> str | None:
            try:
                made.bind(self.endpoint(part))
            except zmq.ZMQError as error:
                return f"engine {self.name} cannot bind {self.endpoint(part)}: {error}"
            return None

        wait_until(try_to_bind, REBIND_WITHIN_S)
        return made

    def subscriptions(self) -> list[str]:
        """Returns the topics subscribed to now, as hex."""
        while self._publisher.poll(0):
            message = self._publisher.recv()
            if message[:1] == SUBSCRIBED:
                self._subscriptions.append(message[1:])
            elif message[:1] == UNSUBSCRIBED and message[1:] in self._subscriptions:
                self._subscriptions.remove(message[1:])
        return [topic.hex() for topic in self._subscriptions]

    def wait_subscribed(self, count: int, within_s: float) -> None:
        def check() -> str | None:
            found = len(self.subscriptions())
            if found >= count:
                return None
            return f"engine {self.name}: {found} of {count} subscriptions"

        wait_until(check, within_s)

    def wait_unsubscribed(self, within_s: float) -> None:
        def check() -> str | None:
            found = len(self.subscriptions())
            return f"engine {self.name}: {found} subscriptions" if found else None

        wait_until(check, within_s)

    def publish(self, message: dict[str, Any]) -> None:
        """Sends and keeps one message (`publish` in FORMAT.md)."""
        if "raw_frames_hex" in message:
            self._send([bytes.fromhex(frame) for frame in message["raw_frames_hex"]], message)
            return
        given = message.get("payload_hex")
        payload = pack(message["batch"]) if given is None else bytes.fromhex(given)
        if not message.get("no_buffer"):
            with self._lock:
                self._buffer.append((message["seq"], payload))
        if not message.get("drop"):
            topic = message.get("topic", DEFAULT_TOPIC).encode()
            self._send([topic, message["seq"].to_bytes(8, "big"), payload], message)

    def _send(self, frames: list[bytes], message: dict[str, Any]) -> None:
        if self._context is None:
            raise Failure(f"engine {self.name} is not bound")
        if not message.get("nowait"):
            self.wait_subscribed(1, SUBSCRIPTION_WITHIN_S)
        self._publisher.send_multipart(frames)

    def _answer_requests(self, router: zmq.Socket[bytes]) -> None:
        while not self._stop.is_set():
            if router.poll(REPLAY_POLL_MS):
                asker, *request = router.recv_multipart()
                self.requests.append([frame.hex() for frame in request])
                for frames in self._answer(request):
                    router.send_multipart([asker, b"", *frames])
        router.close(LINGER_MS)

    def _answer(self, request: list[bytes]) -> list[list[bytes]]:
        if self.mode == "silent":
            return []
        end = [END_OF_REPLAY, b""]
        if self.mode == "end_only":
            return [end]
        start = int.from_bytes(request[-1], "big")
        with self._lock:
            kept = [[seq.to_bytes(8, "big"), batch] for seq, batch in self._buffer if seq >= start]
        return [*kept, end]
