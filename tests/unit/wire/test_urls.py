"""URLs of peers: which can be fetched from, and which parts are never shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.wire.urls import Target, masked, parse_kvd, parse_upstream, parse_url


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://a", Target("a", 80, False, "a:80", "/")),
        ("https://a.b/c/d", Target("a.b", 443, True, "a.b:443", "/c/d")),
        ("HTTP://A:8090/", Target("a", 8090, False, "a:8090", "/")),
        ("http://[::1]:1", Target("::1", 1, False, "[::1]:1", "/")),
        ("http://10.0.0.9:", Target("10.0.0.9", 80, False, "10.0.0.9:80", "/")),
        ("http://b\u00fccher.example", Target(*("xn--bcher-kva.example", 80, False),
                                              "xn--bcher-kva.example:80", "/")),
    ],
)  # fmt: skip
def test_what_a_url_names(url: str, target: Target) -> None:
    assert parse_url(url) == target


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("", "not a URL|not of http"),
        ("x", "not a URL|not of http"),
        ("h:8090", "not a URL|not of http"),
        ("ftp://h", "not of http: or https:"),
        ("tcp://h:1", "not of http: or https:"),
        ("http://", "has no host"),
        ("http:///path", "has no host"),
        ("http://:80", "has no host"),
        ("http://[::1", "not a URL|not of http"),
        ("http://[::1%25eth0]", "zone ids"),
        ("http://[1]", "not a URL|not an IPv6"),
        ("http://h:0", "port"),
        ("http://h:65536", "port"),
        ("http://h:x", "port"),
        ("http://h:-1", "port"),
        ("http://h\0", "control characters"),
        ("http://h/\tx", "control characters"),
        ("http://h/a b", "blanks"),
        ("http://h/\u00e4", "ASCII"),
        ("http://h/?x=1", "question mark"),
        ("http://h?", "question mark"),
        ("http://h#x", "#"),
        ("http://h/#", "#"),
        ("http://127.1", "not an address"),
        ("http://a_;b", "not a host name"),
        ("http://*", "every address of a listening machine"),
        ("http://::1:8090", "has brackets"),
        ("http://" + "a" * 64, "not a host name"),
        ("http://u@h:1", "a user or a password"),
        ("http://u:precious@h", "a user or a password"),
        ("http://u:precious/@h", "port"),
        ("http://u:precious", "port"),
    ],
)
def test_what_nothing_can_be_fetched_from(url: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault) as caught:
        parse_url(url)
    assert "precious" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://a:1,http://b:2/c", "http://a:1,http://b:2/c"),
        ("ipc://@abstract", "ipc://@abstract"),
        ("invalid ZMQ endpoint `ipc://@a`", "invalid ZMQ endpoint `ipc://@a`"),
        ("http://u:p@h:1/x", "http://***@h:1/x"),
        ("http://u:p,/@:w@h:1", "http://***@h:1"),
        ("http://a,http://u:p@h", "http://***@h"),
        ("u:p@h", "***@h"),
        ("endpoint `tcp://u:p@h:1`: missing", "endpoint `tcp://***@h:1`: missing"),
    ],
)
def test_what_is_shown_of_a_text(text: str, shown: str) -> None:
    assert masked(text) == shown


@given(st.text(min_size=1), st.text(min_size=1), st.sampled_from(["http://a,", "", "x, "]))
def test_no_user_and_no_password_is_ever_shown(user: str, password: str, before: str) -> None:
    assert masked(f"{before}http://{user.strip('@') or 'u'}:{password}@h").endswith("://***@h")


@pytest.mark.parametrize("url", ["gpu1:8000", "http://", "http://gpu1:8000/v1"])
def test_what_is_expected_of_an_engine_is_what_can_be(url: str) -> None:
    with pytest.raises(ValueError, match=r"expected http://HOST:PORT, or https://$"):
        parse_upstream(url)


def test_where_a_kvd_is_asked() -> None:
    assert parse_kvd("unix:/run/kvd/s").host == "/run/kvd/s"
    over_tcp = parse_kvd("http://kvd:8092")
    assert (over_tcp.host, over_tcp.port) == ("kvd", 8092)


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("unix:kvd.sock", "must begin with a slash"),
        ("unix:/a\nb", "must begin with a slash"),
        ("unix:/" + "a" * 107, "longer than 107 bytes"),
        ("https://kvd:8092", "must begin with http:"),
        ("http://kvd:8092/select", "have no path"),
        ("kvd:8092", "not of http: or https:, expected http://HOST:PORT or unix:/PATH$"),
    ],
)
def test_where_no_kvd_is_asked(url: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        parse_kvd(url)
