"""Tests of this folder may have sockets, but cannot start processes."""

from __future__ import annotations

import socket
import subprocess

import pytest


def test_a_component_test_has_sockets_and_no_process() -> None:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
    with pytest.raises(pytest.fail.Exception, match="Popen"):
        subprocess.run(["true"], check=True)
