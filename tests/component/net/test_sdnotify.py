"""Messages to the service manager arrive, and delay nothing if none listens."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import pytest
import trio

from kvd.platform.sdnotify import (
    READY,
    STOPPING,
    WATCHDOG,
    feed_watchdog,
    notify_ready,
    send,
    watchdog_s,
)


@pytest.mark.parametrize("address", ["{tmp_path}/notify", "@kvd-test-{pid}"])
def test_messages_arrive(tmp_path: Path, address: str) -> None:
    address = address.format(tmp_path=tmp_path, pid=os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0"))
        for message in (READY, WATCHDOG, STOPPING):
            send(message, address)
            assert manager.recv(100) == message


def test_without_a_listening_manager_nothing_happens(tmp_path: Path) -> None:
    assert send(READY, f"{tmp_path}/nobody")
    assert send(READY, "@nobody")


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    address = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        assert send(WATCHDOG, address)
        assert not all(send(WATCHDOG, address) for _ in range(5000))


@pytest.mark.parametrize(
    ("limit_us", "seconds"),
    [("2000000", 2.0), ("0", None), ("", None), ("-1", None), ("often", None)],
)
async def test_a_watchdog_is_fed_if_there_is_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: object,
    limit_us: str,
    seconds: float | None,
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
    monkeypatch.setenv("WATCHDOG_USEC", limit_us)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.setblocking(False)
        with trio.move_on_after(3.5):
            await feed_watchdog(lambda: False)
        heard = 0
        with contextlib.suppress(BlockingIOError):
            while manager.recv(100) == WATCHDOG:
                heard += 1
        assert (heard, watchdog_s()) == (0 if seconds is None else 4, seconds)


async def test_ready_is_said_until_it_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: object
) -> None:
    address = f"{tmp_path}/notify"
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        manager.setblocking(False)
        while send(WATCHDOG, address):
            pass
        async with trio.open_nursery() as nursery:
            nursery.start_soon(notify_ready)
            await trio.sleep(10)
            messages = {manager.recv(100)}
            await trio.sleep(1)
        with contextlib.suppress(BlockingIOError):
            while True:
                messages.add(manager.recv(100))
        assert messages == {WATCHDOG, READY}


async def test_ready_without_a_manager_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    await notify_ready()
    monkeypatch.setenv("NOTIFY_SOCKET", "@nobody-is-there")
    await notify_ready()
