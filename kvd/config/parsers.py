"""The parsers of settings' texts; a ValueError says what is expected."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvd.errors import BadRequest
from kvd.index.peers import MAX_PEERS
from kvd.index.served_models import ServedKey
from kvd.model import is_name
from kvd.wire.egress import AllowedNetworks, parse_networks
from kvd.wire.endpoints import check_bound_endpoint
from kvd.wire.hosts import in_ascii, literal
from kvd.wire.state_address import parse_address
from kvd.wire.urls import (
    parse_dns,
    parse_kvd,
    parse_upstream,
    parse_url,
)
from kvd_core.selector.selector import MAX_ISL_TOKENS
from kvd_core.selector.settings import MAX_WEIGHT

Parse = Callable[[str], Any]

U16_MAX = 2**16 - 1
U32_MAX = 2**32 - 1
U64_MAX = 2**64 - 1
U64_DIGITS = 20  # more digits are refused unread: int() of a long text is slow


MAX_GROUP = 2**32 - 2  # to chown(2) the next number means no group


class Off(StrEnum):
    """The value of a setting that is switched off, distinct from any text."""

    OFF = "off"


OFF = Off.OFF


def parse_file_mode(text: str) -> str:
    """Reads the mode of a file as `chmod` does, but requires the leading zero."""
    if not re.fullmatch("0[0-7]{3}", text):
        raise ValueError('expected a mode of four octal digits: "0660"')
    return text


def parse_path(text: str) -> Path:
    """Reads the name of a file, which may be any text but an empty one."""
    if not text or "\0" in text:
        raise ValueError("expected the name of a file")
    return Path(text)


def parse_folder(text: str) -> Path:
    """Reads the name of a folder; of a list with colons, as systemd passes it, the first."""
    return parse_path(text.partition(":")[0])


def parse_name(text: str) -> str:
    """Reads the name of a model or a tenant."""
    if not is_name(text):
        raise ValueError("the name contains control characters or is not UTF-8")
    return text


def parse_group(text: str) -> str:
    """Reads the name of a group, or its number."""
    if text.isascii() and text.isdigit():
        return str(parse_uint(text, MAX_GROUP))
    if not text or not text.isprintable():
        raise ValueError("expected the name or the number of a group")
    return text


def parse_hosts(text: str) -> tuple[str, ...]:
    """Splits names of hosts, without ports."""
    for name in (names := parse_list(text)):
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,253}", name):
            raise ValueError(f"{name!r} is not a host name")
    return names


def parse_origins(text: str) -> tuple[str, ...]:
    """Splits origins as browsers write them: scheme, host, and port if it is not the default."""
    for origin in (origins := parse_list(text)):
        if not re.fullmatch(r"null|[a-z][a-z0-9+.-]*://[A-Za-z0-9._:\[\]-]{1,253}", origin):
            raise ValueError(f"{origin!r} is not an origin such as https://a.example:8443")
        _check_port(origin)
    return origins


def _check_port(origin: str) -> None:
    try:
        _ = urlsplit(origin).port
    except ValueError:
        raise ValueError(f"the port of {origin!r} is not a number from 0 to 65535") from None


def parse_host(text: str) -> str:
    """Reads a host to listen on: an address, IPv6 perhaps with a zone, or a name."""
    if text == "*":
        raise ValueError("write 0.0.0.0 for every IPv4 address, or [::] for every IPv6 address")
    literal(text.partition("%")[0] if ":" in text else text)
    return text


def parse_server_name(text: str) -> str:
    """Reads the name in a server's certificate: that of a host, or its address."""
    return in_ascii(text)


def parse_uint(text: str, maximum: int) -> int:
    """Reads plain decimal digits, 0 to `maximum`; no sign, blank or underscore."""
    if not (text.isascii() and text.isdigit() and len(text) <= U64_DIGITS) or int(text) > maximum:
        raise ValueError(f"expected a whole number from 0 to {maximum}")
    return int(text)


parse_port = partial(parse_uint, maximum=U16_MAX)
parse_u32 = partial(parse_uint, maximum=U32_MAX)
parse_u64 = partial(parse_uint, maximum=U64_MAX)


def parse_positive(text: str) -> int:
    if (number := parse_u32(text)) == 0:
        raise ValueError("expected a number greater than 0")
    return number


def at_least(minimum: int) -> Parse:
    """Returns a parser of whole numbers from `minimum` on."""

    def parse(text: str) -> int:
        value = parse_u64(text)
        if value < minimum:
            raise ValueError(f"expected a number from {minimum}")
        return value

    return parse


def within(minimum: int, maximum: int) -> Parse:
    """Returns a parser of whole numbers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        with suppress(ValueError):
            if (value := parse_uint(text, maximum)) >= minimum:
                return value
        raise ValueError(f"expected a whole number from {minimum} to {maximum}")

    return parse


def real(what: str, minimum: float, maximum: float) -> Parse:
    """Returns a parser of numbers from `minimum` to `maximum`, as TOML writes them."""

    def parse(text: str) -> float:
        with suppress(ValueError):
            if text.isascii() and "_" not in text and minimum <= (value := float(text)) <= maximum:
                return value
        raise ValueError(f"expected {what} from {minimum:g} to {maximum:g}")

    return parse


parse_seconds = real("seconds,", 0.001, 86400)
parse_pause = real("seconds,", 0, 3600)
parse_lease = real("seconds,", 1, 3600)  # a shorter lease could end while the loop is busy
parse_weight = real("a number", 0, MAX_WEIGHT)
parse_share = real("a number", 0, 1)


def or_off(parse: Parse, *words: str) -> Parse:
    """Returns a parser that reads OFF, or one of `words` for it, and all else as `parse` does."""
    return lambda text: OFF if text == OFF or text.lower() in words else parse(text)


parse_grace = or_off(parse_pause)


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Returns the known name that a wrong one was probably meant to be, None if none is like it.

    `likeness` is the least ratio of difflib; 0.6 is its own.
    """
    from difflib import get_close_matches  # imported here: it takes 0.14 MB, and few need it

    return next(iter(get_close_matches(name, list(known), n=1, cutoff=likeness)), None)


def parse_endless_grace(text: str) -> Any:
    """Reads a grace that may also be `inf`, which never ends."""
    return math.inf if text == "inf" else parse_grace(text)


parse_state_dir = or_off(parse_folder)
# The originals write None.
parse_threshold = or_off(parse_weight, OFF, "none")
parse_share_threshold = or_off(parse_share, OFF, "none")
parse_tokens_threshold = or_off(partial(parse_uint, maximum=MAX_ISL_TOKENS), OFF, "none")


def parse_state_url(text: str) -> str:
    """Checks the address of a server for shared state."""
    parse_address(text)
    return text


def parse_advertised(text: str) -> str:
    """Checks a URL under which others reach this process."""
    parse_url(text)
    return text.rstrip("/")


def parse_prefix(text: str) -> str:
    """Checks a prefix for the names of keys on a server."""
    if not re.fullmatch(r"[A-Za-z0-9._:-]{1,64}", text):
        raise ValueError("expected up to 64 of A-Z a-z 0-9 . _ : -")
    return text


def parse_switch(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("expected true or false")


def one_of(values: Iterable[str]) -> Parse:
    """Returns a parser that accepts these words, in any case."""
    known = {str(value): value for value in values}

    def parse(text: str) -> str:
        if (value := known.get(text.lower())) is None:
            raise ValueError(f"expected one of {', '.join(known)}")
        return value

    return parse


def parse_list(text: str) -> tuple[str, ...]:
    """Splits at commas; drops blanks around entries, and empty entries."""
    return tuple(filter(None, map(str.strip, text.split(","))))


def parse_peers(text: str) -> tuple[str, ...]:
    """Reads URLs between commas, keeps each once, and checks that all can be fetched from."""
    urls = _each_once(text)
    for number, url in enumerate(urls, 1):
        try:
            parse_url(url)
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
    return urls


def parse_served(text: str) -> tuple[str, ...]:
    """Reads models, and single tenants of models, between commas."""
    entries = tuple(dict.fromkeys(parse_list(text)))
    for entry in entries:
        served_key(entry)
    return entries


def parse_owners(text: str) -> tuple[str, ...]:
    """Reads MODEL[@TENANT]=URL between commas."""
    entries = tuple(dict.fromkeys(parse_list(text)))
    for entry in entries:
        owner_of(entry)
    return entries


def owner_of(entry: str) -> tuple[ServedKey, str]:
    """Splits MODEL[@TENANT]=URL; raises ValueError."""
    named, _, url = entry.partition("=")
    parse_url(url)
    return served_key(named), url


def served_key(text: str) -> ServedKey:
    """Reads MODEL or MODEL@TENANT; a model with an `@` in its name needs a tenant as well."""
    model_name, at, tenant_id = text.rpartition("@")
    key = (model_name, tenant_id) if at else (text, None)
    if not all(key[: 1 + bool(at)]):
        raise ValueError(f"{text!r}: expected MODEL or MODEL@TENANT")
    for name in filter(None, key):
        parse_name(name)
    return key


def parse_upstreams(text: str) -> tuple[str, ...]:
    """Reads URLs of engines, and names that lead to engines, between commas."""
    urls = parse_list(text)
    for url in urls:
        if parse_dns(url) is None:
            parse_upstream(url)
    return tuple(dict.fromkeys(urls))


def parse_kvds(text: str) -> tuple[str, ...]:
    """Reads URLs of kvds, between commas."""
    urls = parse_list(text)
    for url in urls:
        parse_kvd(url)
    return tuple(dict.fromkeys(urls))


def parse_replica_port(text: str) -> int:
    if (port := parse_port(text)) == 0:
        raise ValueError("expected a port from 1 to 65535, to which replicas connect")
    return port


def parse_replica_peers(text: str) -> tuple[str, ...]:
    """Reads endpoints between commas, keeps each once, and checks them."""
    endpoints = _each_once(text)
    for endpoint in endpoints:
        try:
            check_bound_endpoint(endpoint)
        except BadRequest as error:
            raise ValueError(str(error)) from None
    return endpoints


def _each_once(text: str) -> tuple[str, ...]:
    peers = tuple(dict.fromkeys(parse_list(text)))
    if len(peers) > MAX_PEERS:
        raise ValueError(f"the list has more than {MAX_PEERS} peers")
    return peers


def parse_outgoing(text: str) -> AllowedNetworks:
    """Reads networks, or words for some, between commas; an empty list allows no connection."""
    return parse_networks(parse_list(text))
