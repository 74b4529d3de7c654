"""Which web pages may have a browser send requests."""

from __future__ import annotations

import pytest

from kvd.http.permits import VERDICTS, PermitRules
from kvd.http.routes import Scope

SECRET = b"0123456789abcdef"


def verdict(
    host: bytes, origin: bytes, *, tokens: bool = False, hosts: tuple[bytes, ...] = ()
) -> str:
    """Returns the verdict on a request that has the token; with `tokens` the rules have it, too."""
    rules = PermitRules()
    rules.replace([(SECRET, Scope.READ)] if tokens else [], list(hosts), [])
    headers = [(b"host", host), (b"origin", origin), (b"authorization", b"Bearer " + SECRET)]
    return VERDICTS[rules.judge(headers, Scope.READ, checks_host=False)]


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"127.0.0.1:8090", b"http://127.0.0.1:8090"),
        (b"localhost:8090", b"https://LOCALHOST:8090"),
        (b"[::1]:8090", b"http://[::1]:8090"),
        (b"10.0.0.7", b"https://10.0.0.7"),
        (b"kvd.example", b"https://kvd.example"),
    ],
)
def test_a_page_of_the_server_itself_may(host: bytes, origin: bytes) -> None:
    assert verdict(host, origin, hosts=(b"kvd.example",)) == "granted"


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (b"127.0.0.1:8090", b"http://127.0.0.1:8091"),
        (b"127.0.0.1:8090", b"http://localhost:8090"),
        (b"127.0.0.1:8090", b"http://127.0.0.1:8090.evil.example"),
        (b"127.0.0.1:8090", b"ftp://127.0.0.1:8090"),
        (b"127.0.0.1:8090", b"127.0.0.1:8090"),
        (b"127.0.0.1:8090", b"null"),
        (b"127.0.0.1:8090", b"http://"),
        (b"", b"http://"),
        (b"127.0.0.1:8090", b""),
    ],
)
def test_any_other_page_may_not(host: bytes, origin: bytes) -> None:
    assert verdict(host, origin) == verdict(host, origin, tokens=True) == "origin"


def test_a_page_whose_own_name_was_led_here_may_not_unless_it_knows_a_token() -> None:
    rebound = b"evil.example:8090", b"http://evil.example:8090"
    assert verdict(*rebound) == "origin"
    assert verdict(*rebound, tokens=True) == "granted"


def test_two_hosts_are_nobodys_own() -> None:
    rules = PermitRules()
    rules.replace([(SECRET, Scope.READ)], [], [])
    shown = [(b"origin", b"http://a:1"), (b"authorization", b"Bearer " + SECRET)]
    twice = [(b"host", b"a:1"), (b"host", b"a:1"), *shown]
    assert VERDICTS[rules.judge(twice, Scope.READ, checks_host=False)] == "origin"
