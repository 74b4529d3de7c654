"""ZMQ endpoints are checked: which are refused, with which words, and which pass."""

from __future__ import annotations

import pytest

from kvd.errors import BadRequest
from kvd.wire.endpoints import check_endpoint, check_replay_endpoint, is_ipv6

DIGITS = "invalid TCP port: invalid digit found in string"
EMPTY = "invalid TCP port: cannot parse integer from empty string"
LARGE = "invalid TCP port: number too large to fit in target type"

# The error texts of Dynamo, except those about characters, which Dynamo accepts.
REFUSED = {
    "": "missing scheme",
    "foo": "missing scheme",
    "tcp:/": "missing scheme",
    "127.0.0.1:5557": "missing scheme",
    "://": "missing address",
    "tcp://": "missing address",
    "ipc://": "missing address",
    "inproc://": "missing address",
    "://x": "unsupported scheme ``",
    "udp://127.0.0.1:5557": "unsupported scheme `udp`",
    "http://h:1": "unsupported scheme `http`",
    "TCP://127.0.0.1:1": "unsupported scheme `TCP`",
    " tcp://127.0.0.1:1": "unsupported scheme ` tcp`",
    "tcp://127.0.0.1": "missing TCP port",
    "tcp://::1:5": "missing TCP port; an IPv6 address has brackets: tcp://[::1]:5",
    "tcp://::1": "missing TCP port; an IPv6 address has brackets",
    "tcp://fd00::a:5557": "missing TCP port; an IPv6 address has brackets: tcp://[fd00::a]:5557",
    "tcp://a:5:6": "missing TCP port",
    "tcp://tcp://a:5": "missing TCP port",
    "tcp://a:5;b:6": "missing TCP port",
    "tcp://:5557": "missing TCP host",
    "tcp://:": "missing TCP host",
    "tcp://[]:5": "missing TCP host",
    "tcp://[::1]": "missing closing `]`",
    "tcp://[::1:5": "missing closing `]`",
    "tcp://[::1]x:5": "missing closing `]`",
    "tcp://127.0.0.1:": EMPTY,
    "tcp://127.0.0.1:abc": DIGITS,
    "tcp://127.0.0.1:-1": DIGITS,
    "tcp://127.0.0.1:+1": DIGITS,
    "tcp://127.0.0.1:1 ": DIGITS,
    "tcp://127.0.0.1: 1": DIGITS,
    "tcp://a:5/": DIGITS,
    "tcp://a:0x5": DIGITS,
    "tcp://a:٣": DIGITS,
    "tcp://a:²": DIGITS,
    "tcp://a:5\n": DIGITS,
    "tcp://a:5\0b": DIGITS,
    "tcp://127.0.0.1:65536": LARGE,
    "tcp://127.0.0.1:99999": LARGE,
    "tcp://a:" + "9" * 5000: LARGE,
    "tcp://a;b:5": "invalid character ';'",
    "tcp://a b:5": "invalid character ' '",
    "tcp://a\0:5": r"invalid character '\x00'",
    "tcp://a\n:5": r"invalid character '\n'",
    "tcp://a\ud800:5": r"invalid character '\ud800'",
    "tcp://a\u2028:5": r"invalid character '\u2028'",
    "ipc:// ": "invalid character ' '",
    "ipc://a\0": r"invalid character '\x00'",
    "inproc://a;b": "invalid character ';'",
}

PASSED = [
    "tcp://127.0.0.1:5557",
    "tcp://127.0.0.1:0",
    "tcp://127.0.0.1:65535",
    "tcp://a:00005",
    "tcp://a:" + "0" * 5000 + "5",
    "tcp://*:5557",
    "tcp://worker-0.workers.svc:5557",
    "tcp://[::1]:5557",
    "tcp://[fe80::1%eth0]:5557",
    "ipc:///run/engine/kv.sock",
    "ipc://@abstract",
    "inproc://x",
]


@pytest.mark.parametrize("endpoint", REFUSED)
def test_refused(endpoint: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_endpoint(endpoint)
    assert str(caught.value) == f"invalid ZMQ endpoint `{endpoint}`: {REFUSED[endpoint]}"


@pytest.mark.parametrize("endpoint", PASSED)
def test_passed(endpoint: str) -> None:
    check_endpoint(endpoint)
    check_replay_endpoint(endpoint)


def test_replay_endpoint_is_named_as_such() -> None:
    with pytest.raises(BadRequest) as caught:
        check_replay_endpoint("foo")
    assert str(caught.value) == (
        "invalid replay endpoint `foo`: invalid ZMQ endpoint `foo`: missing scheme"
    )


def test_users_and_passwords_are_not_repeated() -> None:
    for check, what in ((check_endpoint, "ZMQ"), (check_replay_endpoint, "replay")):
        with pytest.raises(BadRequest) as caught:
            check("tcp://me:secret@10.0.0.1:5557")
        assert str(caught.value).startswith(f"invalid {what} endpoint `tcp://***@10.0.0.1:5557`: ")
        assert "secret" not in str(caught.value)


def test_ipv6_is_known_by_its_brackets() -> None:
    assert is_ipv6("tcp://[::1]:5")
    assert not is_ipv6("tcp://localhost:5")
    assert not is_ipv6("ipc://[x")
