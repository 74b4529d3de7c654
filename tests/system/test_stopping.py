"""SIGTERM, also while kvd starts: it gives up whatever it waits for."""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest
import trio
import trio.abc

from kvd.app.assembly import DescriptorBounds, Start
from kvd.app.daemon import serve
from kvd.config.binds import Binds, TcpBind
from kvd.config.load import load
from kvd.config.parsers import OFF
from kvd.config.reload import ConfigReader
from kvd.config.sources import FACE_BINDS
from kvd.platform.activation import PassedSockets
from kvd.platform.signals import Signals
from tests.support.ports import find_free_port
from tests.support.processes import STOP_DEADLINE_S, Server, clean_environment, reads
from tests.support.running import running


class Mute(trio.abc.HostnameResolver):
    """Nameservers that cannot be reached: a lookup never ends."""

    def __init__(self) -> None:
        self.asked = trio.Event()

    async def getaddrinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        self.asked.set()
        await trio.sleep_forever()
        raise AssertionError

    async def getnameinfo(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError


@pytest.mark.parametrize(
    "settings",
    [
        {"slot_tracker_bind": Binds((TcpBind("kvd.example", 0),))},
        {
            "slot_tracker_bind": Binds((TcpBind("127.0.0.1", 0),)),
            "replica_sync_host": "kvd.example",
            "replica_sync_port": find_free_port(),
        },
    ],
    ids=["of a face", "of replica sync"],
)
async def test_a_name_that_is_looked_up_holds_up_no_stop(settings: dict[str, object]) -> None:
    given: dict[str, object] = dict.fromkeys(FACE_BINDS, OFF) | settings
    bounds = DescriptorBounds(100, 100)
    start = Start(load(given, {}), ConfigReader(given, {}), bounds, PassedSockets())
    trio.socket.set_custom_hostname_resolver(resolver := Mute())
    codes = []

    # The signal goes to this thread, as the tests' other threads do not block it.
    with closing(Signals(signal.SIGUSR1)) as ends, closing(Signals()) as reloads:

        async def run() -> None:
            codes.append(await serve(start, ends, reloads))

        with trio.fail_after(STOP_DEADLINE_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(run)
                await resolver.asked.wait()
                signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
    assert codes == [0]


def test_a_file_that_does_not_come_holds_up_no_stop(tmp_path: Path) -> None:
    fleet, port = tmp_path / "fleet.toml", find_free_port()
    os.mkfifo(fleet)
    command = [sys.executable, "-m", "kvd", "indexer", "--port", str(port)]
    server = Server([*command, "--fleet-file", str(fleet)], tmp_path, port, clean_environment())
    try:
        fleet.write_text("")  # for the check of the settings; the next read hangs
        server.wait_until(lambda: reads(server.process.pid, signal.SIGTERM), "ready for signals")
        assert server.stop() == 0
        assert "event=stopped" in server.stderr
        assert "event=serving" not in server.stderr
    finally:
        server.stop()


def test_the_file_of_a_unix_socket_goes_with_kvd(tmp_path: Path) -> None:
    path = tmp_path / "kvd.sock"
    port = find_free_port()
    binds = [f"--indexer-bind=127.0.0.1:{port},unix:{path}"]
    binds += [f"--{face}-bind=off" for face in ("slot-tracker", "selection", "conductor")]
    with running(tmp_path, port, "serve", *binds):
        assert path.is_socket()
    assert not path.exists()
