"""The first bytes of an answer show what kind of server it is."""

from __future__ import annotations

import pytest

from kvd.diagnosis.evidence import ProbeResult
from kvd.diagnosis.probes import GREETING, READY, is_greeting, read_probe


@pytest.mark.parametrize(
    "received", [b"", b"HTTP/1.1 400 Bad Request", b"\xff", b"\xff\0\0\0\0\0\0\0\1\0"]
)
def test_who_does_not_greet_speaks_something_else(received: bytes) -> None:
    assert read_probe(received) == ProbeResult(received=received)


def test_a_greeting_and_a_socket_type() -> None:
    assert read_probe(GREETING[:12]) == ProbeResult(received=GREETING[:12], is_zmtp=True)
    probe = read_probe(GREETING)
    assert (probe.is_zmtp, probe.mechanism, probe.socket_type) == (True, "NULL", "")
    assert read_probe(GREETING + READY).socket_type == "SUB"
    assert read_probe(GREETING + READY[:-1]).socket_type == ""
    assert read_probe(GREETING.replace(b"NULL\0", b"CURVE")).mechanism == "CURVE"


def test_a_greeting_is_known_by_its_first_and_its_tenth_byte() -> None:
    assert is_greeting(b"\xff") and is_greeting(GREETING[:10]) and not is_greeting(b"H")
