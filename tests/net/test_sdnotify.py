from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvd.net.sdnotify import READY, STOPPING, WATCHDOG, notify


@pytest.mark.parametrize("address", ["{tmp_path}/notify", "@kvd-test-{pid}"])
def test_messages_arrive(tmp_path: Path, address: str) -> None:
    address = address.format(tmp_path=tmp_path, pid=os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address.replace("@", "\0"))
        for message in (READY, WATCHDOG, STOPPING):
            notify(message, address)
            assert manager.recv(100) == message


def test_without_a_listening_manager_nothing_happens(tmp_path: Path) -> None:
    notify(READY, f"{tmp_path}/nobody")
    notify(READY, "@nobody")


def test_a_manager_that_does_not_read_holds_nothing_up(tmp_path: Path) -> None:
    address = f"{tmp_path}/notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(address)
        for _ in range(5000):
            notify(WATCHDOG, address)
