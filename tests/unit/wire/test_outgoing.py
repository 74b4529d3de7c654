"""Which addresses kvd may connect to, however they are written."""

from __future__ import annotations

import socket
from contextlib import suppress
from ipaddress import ip_address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import BadRequest
from kvd.wire.egress import EgressPolicy, parse_networks
from kvd.wire.hosts import literal, normal

PRIVATE = [
    "127.0.0.1",
    "127.255.255.254",
    "10.0.0.1",
    "10.255.255.255",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.0.1",
    "100.64.0.1",
    "100.127.255.255",
    "::1",
    "fc00::1",
    "fd12:3456::1",
    "::ffff:10.0.0.1",
    "::ffff:a00:1",
]

PUBLIC = [
    "8.8.8.8",
    "172.15.255.255",
    "172.32.0.1",
    "100.63.255.255",
    "100.128.0.1",
    "2606:4700::1111",
]

# Special addresses: an allowed network that is wider than their own range does not include them.
NEVER = [
    "0.0.0.0",
    "0.1.2.3",
    "169.254.0.1",
    "169.254.169.254",
    "169.254.170.2",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "fe80::1",
    "fec0::1",
    "ff02::1",
    "fd00:ec2::254",
    "fd20:ce::254",
]

# 169.254.169.254 inside IPv6: mapped, 6to4, NAT64 in both forms, translated, compatible, Teredo.
HIDDEN = [
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "2002:a9fe:a9fe::1",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1::a9fe:a9fe",
    "::ffff:0:a9fe:a9fe",
    "::a9fe:a9fe",
    "2001:0:a9fe:a9fe:0:0:f7f7:f7f7",
    "2001:0:808:808:0:0:5601:5601",
]

ODD = [
    "127.1",
    "127.0.1",
    "0x7f000001",
    "0x7f.0.0.1",
    "0X7F.1",
    "0177.0.0.1",
    "127.0.0.01",
    "2130706433",
    "017700000001",
    "127.0.0.1.",
    "10.0.0.256",
    "1.2.3.4.5",
    "10.0.0.0x1",
    "0x",
    "1",
    "fe80::1%eth0",
    "::1%lo",
    "::1%1",
    ":::1",
    "::ffff:127.1",
    "12345::1",
]

NO_NAMES = [
    "*a",
    "a..b",
    ".a",
    "-a",
    "a-",
    "a_b-",
    "a" * 64,
    "a." * 127 + "a",
    "a/b",
    "a@b",
    "a\\b",
]
NO_NAMES += ["bücher", "\uff11\uff12\uff17.a", "169.254.169.254\u3002x", "a#", "a?b", "%6c", "ſ"]


def endpoint(host: str) -> str:
    return f"tcp://[{host}]:5557" if ":" in host else f"tcp://{host}:5557"


def passes(outgoing: EgressPolicy, text: str) -> bool:
    try:
        outgoing.check_endpoint(text)
    except BadRequest:
        return False
    return True


@pytest.mark.parametrize("host", PRIVATE)
def test_private_addresses_may_be_connected_to(host: str) -> None:
    EgressPolicy().check_endpoint(endpoint(host))
    EgressPolicy().check_replay_endpoint(endpoint(host))
    EgressPolicy().check_bound_endpoint(endpoint(host))


@pytest.mark.parametrize("host", [*PUBLIC, *NEVER, *HIDDEN])
def test_others_may_not(host: str) -> None:
    outgoing = EgressPolicy()
    checks = (
        outgoing.check_endpoint,
        outgoing.check_replay_endpoint,
        outgoing.check_bound_endpoint,
    )
    everywhere = host in ("0.0.0.0", "::")
    why = "stands for every address of .*" if everywhere else "is not in outgoing_allow"
    for count, check in enumerate(checks, 1):
        with pytest.raises(BadRequest, match=rf"^invalid .* {why}$"):
            check(endpoint(host))
        assert outgoing.refused_names == count
    with pytest.raises(BadRequest, match=rf"^invalid URL: .* {why}$"):
        outgoing.check_url(endpoint(host).replace("tcp", "http"))


@pytest.mark.parametrize("host", ODD)
def test_odd_spellings_are_nobodys_address(host: str) -> None:
    for allowed in (["private"], ["0.0.0.0/0", "::/0", "fe80::/10"]):
        with pytest.raises(BadRequest, match=r"not an (address of|IPv6)|zone ids"):
            EgressPolicy(parse_networks(allowed)).check_endpoint(endpoint(host))


@pytest.mark.parametrize("host", NO_NAMES)
def test_what_no_name_consists_of(host: str) -> None:
    with pytest.raises(BadRequest, match=r"is not a host name|no address in the form"):
        EgressPolicy().check_endpoint(endpoint(host))


@pytest.mark.parametrize("host", ["a", "localhost", "w-0.ns.svc.cluster.local.", "a_b"])
def test_names_pass_until_they_are_resolved(host: str) -> None:
    EgressPolicy(parse_networks([])).check_endpoint(endpoint(host))


def test_brackets_are_for_ipv6() -> None:
    for host in ("10.0.0.1", "localhost", "x"):
        assert not passes(EgressPolicy(), f"tcp://[{host}]:5557")


@pytest.mark.parametrize("host", [*NEVER, *HIDDEN])
def test_everything_does_not_mean_what_nobody_means(host: str) -> None:
    outgoing = EgressPolicy(parse_networks(["0.0.0.0/0", "::/0"]))
    assert not passes(outgoing, endpoint(host))
    assert all(passes(outgoing, endpoint(each)) for each in (*PRIVATE, *PUBLIC))


@pytest.mark.parametrize("host", NEVER)
def test_who_is_named_exactly_is_meant(host: str) -> None:
    assert passes(EgressPolicy(parse_networks([host])), endpoint(host))


@pytest.mark.parametrize("host", HIDDEN)
def test_a_named_metadata_address_is_meant_in_its_other_forms_too(host: str) -> None:
    everything = ["::/0", "169.254.169.254", "8.8.8.8"]
    assert passes(EgressPolicy(parse_networks(everything)), endpoint(host))


def test_a_network_inside_a_special_one_means_no_address_that_is_special_beyond() -> None:
    outgoing = EgressPolicy(parse_networks(["169.254.0.0/16"]))
    assert passes(outgoing, endpoint("169.254.7.1"))
    assert not passes(outgoing, endpoint("169.254.169.254"))


@pytest.mark.parametrize(
    "host", ["2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1", "::a00:1"]
)
def test_a_private_address_inside_of_another_one_is_named_by_itself(host: str) -> None:
    assert not passes(EgressPolicy(parse_networks(["::/0"])), endpoint(host))
    assert passes(EgressPolicy(parse_networks(["::/0", "private"])), endpoint(host))
    assert passes(EgressPolicy(parse_networks(["::/0"])), endpoint("64:ff9b::808:808"))


def test_what_is_said_replaces_the_default() -> None:
    outgoing = EgressPolicy(parse_networks(["203.0.113.0/24"]))
    assert passes(outgoing, endpoint("203.0.113.9"))
    assert not any(passes(outgoing, endpoint(each)) for each in PRIVATE)
    assert not passes(outgoing, "ipc:///run/engine.sock")
    assert not passes(outgoing, "inproc://x")
    outgoing.allow(parse_networks(["private", "ipc"]))
    assert all(passes(outgoing, endpoint(each)) for each in PRIVATE)
    assert passes(outgoing, "ipc:///run/engine.sock")


@pytest.mark.parametrize("text", ["10.0.0.1/8", "10.0.0.0/33", "localhost", "0x7f.1", "Private"])
def test_places_are_networks_in_the_usual_form(text: str) -> None:
    with pytest.raises(ValueError, match="is neither a network"):
        parse_networks([text])


def test_places_in_their_usual_form() -> None:
    assert str(parse_networks(["10.0.0.1", "FD00::/8", "ipc", "10.0.0.1/32"])) == (
        "10.0.0.1/32,fd00::/8,ipc"
    )


@pytest.mark.parametrize(
    "url", ["http://[::1", "http:169.254.169.254", "//", "x", "http://h:99999", ""]
)
def test_what_is_no_url_is_left_to_whoever_fetches_it(url: str) -> None:
    EgressPolicy().check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://u:p@169.254.169.254/",
        "http://u:p@10.0.0.1/",
        "u:p@10.0.0.1",
        "https://169.254.169.254:443/x",
        "HTTP://169.254.169.254",
        "http://[::ffff:169.254.169.254]:80",
        "http://[fe80::1%25eth0]/",
        "http://8.8.8.8#@10.0.0.1",
        "http://0x7f.1/",
    ],
)
def test_urls_to_forbidden_places(url: str) -> None:
    with pytest.raises(BadRequest, match=r"^invalid URL"):
        EgressPolicy().check_url(url)


PARTS = st.one_of(
    st.sampled_from(
        [
            "0",
            "00",
            "1",
            "7",
            "8",
            "10",
            "127",
            "169",
            "254",
            "255",
            "256",
            "0x7f",
            "0xa9fe",
            "0177",
            "2130706433",
            "a9fe",
            "ffff",
        ]
    ),
    st.integers(0, 2**32).map(str),
    st.integers(0, 2**32).map(hex),
    st.integers(0, 2**32).map(lambda number: f"0{number:o}"),
)
WRITTEN = st.one_of(
    st.lists(PARTS, min_size=1, max_size=5).map(".".join),
    st.lists(PARTS, min_size=1, max_size=5).map(lambda parts: ".".join(parts) + "."),
    st.ip_addresses().map(str),
    st.ip_addresses(v=6).map(lambda address: address.exploded),
    st.tuples(st.sampled_from(["::", "::ffff:", "64:ff9b::", "fe80::"]), st.ip_addresses(v=4)).map(
        lambda pair: f"{pair[0]}{pair[1]}"
    ),
    st.text("0123456789abcdefx.:%", min_size=1, max_size=20),
)


@given(WRITTEN)
def test_no_library_reads_an_address_where_we_read_a_name(host: str) -> None:
    """A text that the C library reads as an address is the same address for kvd, or refused."""
    try:
        ((*_, address), *_) = socket.getaddrinfo(
            host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except (OSError, UnicodeError):
        return
    with suppress(ValueError):
        found = literal(host)
        assert found is not None
        assert found == normal(ip_address(address[0].partition("%")[0]))


def test_of_a_names_addresses_the_allowed_ones_are_left() -> None:
    found = ["169.254.169.254", "10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0", "fd01::1", "8.8.8.8"]
    assert EgressPolicy().allowed_of(found) == ["10.0.0.1", "fd01::1"]


def test_literals() -> None:
    assert literal("::ffff:10.0.0.1") == ip_address("10.0.0.1")
    assert literal("a10") is None
