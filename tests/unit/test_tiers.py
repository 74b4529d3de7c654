"""Tests of this folder and of tests/component cannot do what they must not."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tests.support.tiers import PROCESSES, forbidding


def test_a_unit_test_can_neither_connect_nor_start_a_process() -> None:
    with socket.socket() as made:
        with pytest.raises(pytest.fail.Exception, match=r"socket\.bind"):
            made.bind(("127.0.0.1", 0))
        with pytest.raises(pytest.fail.Exception, match=r"socket\.connect"):
            made.connect(("127.0.0.1", 9))
    with pytest.raises(pytest.fail.Exception, match=r"subprocess\.Popen"):
        subprocess.run(["true"], check=True)


def test_a_component_test_has_sockets_and_no_process() -> None:
    with forbidding(PROCESSES):
        with socket.socket() as made:
            made.bind(("127.0.0.1", 0))
        with pytest.raises(pytest.fail.Exception, match=r"subprocess\.Popen"):
            subprocess.run(["true"], check=True)
