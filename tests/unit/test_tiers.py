"""Tests of this folder cannot do things that belong in another folder."""

from __future__ import annotations

import socket
import subprocess

import pytest


def test_a_unit_test_can_neither_connect_nor_start_a_process() -> None:
    with socket.socket() as made:
        with pytest.raises(pytest.fail.Exception, match=r"socket\.bind"):
            made.bind(("127.0.0.1", 0))
        with pytest.raises(pytest.fail.Exception, match=r"socket\.connect"):
            made.connect(("127.0.0.1", 9))
    with pytest.raises(pytest.fail.Exception, match=r"Popen"):
        subprocess.run(["true"], check=True)
