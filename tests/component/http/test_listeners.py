"""Bind addresses, and the socket files that they leave behind."""

from __future__ import annotations

import grp
import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import trio

from kvd.config.errors import StartError
from kvd.config.load import load
from kvd.http.app import build_app
from kvd.http.context import ServerContext
from kvd.http.front import Front
from kvd.http.limits import HttpLimits
from kvd.http.listeners import file_remover, open_listeners, open_shared, split_host_port
from kvd.http.options import UnixRights
from tests.support.serving import ROUTES, Client


@pytest.mark.parametrize(
    ("bind", "expected"),
    [
        ("127.0.0.1:8090", ("127.0.0.1", 8090)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:65535", ("localhost", 65535)),
    ],
)
def test_host_and_port_are_split(bind: str, expected: tuple[str, int]) -> None:
    assert split_host_port(bind) == expected


@pytest.mark.parametrize(
    "bind", ["", "8090", ":8090", "host:", "host:x", "host:-1", "host:65536", "::1:80", "h:٣"]
)
def test_other_forms_are_refused_by_name(bind: str) -> None:
    with pytest.raises(ValueError, match="bind address"):
        split_host_port(bind)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_a_port_in_use_is_an_error_that_names_it(host: str) -> None:
    first, *others = await open_listeners(f"{host}:0")
    port = first.getsockname()[1]
    for sock in others:
        sock.close()
    with first, pytest.raises(OSError, match=rf"cannot listen on .*:{port}: Address already"):
        await open_listeners(f"{host}:{port}")
    for again in await open_listeners(f"{host}:{port}"):  # at once, despite TIME_WAIT
        again.close()


async def test_a_host_that_does_not_resolve_is_named() -> None:
    with pytest.raises(OSError, match=r"cannot listen on no\.such\.host\.invalid:1: "):
        await open_listeners("no.such.host.invalid:1")


async def test_a_unix_socket_serves_its_owner_and_group(tmp_path: Path) -> None:
    path = tmp_path / "kvd.sock"
    front = Front(
        ROUTES, build_app(ROUTES, HttpLimits(), ServerContext()), HttpLimits(), ServerContext()
    )
    stop = trio.Event()
    listeners = await open_listeners(f"unix:{path}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve, listeners, stop)
        async with await trio.open_unix_socket(os.fspath(path)) as stream:
            client = Client(stream)
            assert (await client.request("GET", "/describe")).status == 200
            assert (await client.request("GET", "/app/describe")).status == 200
            stop.set()
            assert await client.read_to_end() == b""
    assert front.stats.bugs == 0


async def test_only_a_stale_socket_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "kvd.sock"
    (first,) = await open_listeners(f"unix:{path}")
    with pytest.raises(OSError, match=r"cannot listen on unix:.*: Address already in use"):
        await open_listeners(f"unix:{path}")
    first.close()
    (second,) = await open_listeners(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(os.fspath(path))
    second.close()
    path.unlink()
    path.write_text("precious")
    with pytest.raises(OSError, match=r"kvd.sock: a file that is not a socket has this name$"):
        await open_listeners(f"unix:{path}")
    assert path.read_text() == "precious"


@pytest.mark.parametrize("path", ["/no/such/directory/kvd.sock", "/tmp/" + "x" * 200])
async def test_an_impossible_socket_file_is_named(path: str) -> None:
    with pytest.raises(OSError, match=f"cannot listen on unix:{path}"):
        await open_listeners(f"unix:{path}")


async def test_a_unix_socket_has_the_rights_it_is_given(tmp_path: Path) -> None:
    path, own = tmp_path / "s", os.getgid()
    before = os.umask(0o077)
    try:
        for mode, group in ((0o600, None), (0o666, str(own)), (0o660, grp.getgrgid(own).gr_name)):
            (listener,) = await open_listeners(f"unix:{path}", UnixRights(mode, group))
            with listener:
                assert stat.S_IMODE(path.stat().st_mode) == mode
                assert path.stat().st_gid == own
            path.unlink()
    finally:
        os.umask(before)
    with pytest.raises(OSError, match="the group nobodies-group does not exist"):
        await open_listeners(f"unix:{path}", UnixRights(0o660, "nobodies-group"))
    assert not path.exists()


async def test_a_socket_file_goes_unless_it_is_anothers(tmp_path: Path) -> None:
    path = tmp_path / "s"
    (first,) = await open_listeners(f"unix:{path}")
    with first:
        remove = file_remover(first)
    (second,) = await open_listeners(f"unix:{path}")
    with second:
        remove()
        assert path.exists()
        file_remover(second)()
        assert not path.exists()
        remove()  # does nothing, as the file is gone


def test_rights_are_said_in_octal() -> None:
    config = load({}, {"KVD_UNIX_SOCKET_MODE": "0600", "KVD_UNIX_SOCKET_GROUP": "kvd"})
    assert config.unix_rights == UnixRights(0o600, "kvd")
    for bad in ("600", "0o600", "0800", "432", "00600"):  # 432: 0o600 as a TOML number
        with pytest.raises(StartError, match="four octal digits"):
            load({}, {"KVD_UNIX_SOCKET_MODE": bad})


def test_processes_share_an_address_and_strangers_do_not() -> None:
    [[first], [second]] = open_shared("127.0.0.1:0", 2)
    with first, second:
        assert first.getsockname() == second.getsockname()
        address = f"127.0.0.1:{first.getsockname()[1]}"
        met = set()
        with ExitStack() as clients:
            for _ in range(40):  # all reach the same socket with probability 2^-39
                clients.enter_context(socket.create_connection(first.getsockname()))
            for sock in (first, second):
                with suppress(BlockingIOError):
                    sock.accept()[0].close()
                    met.add(sock)
        assert met == {first, second}
        with pytest.raises(OSError, match=f"cannot listen on {address}: Address already in use"):
            open_shared(address, 2)


def test_a_shared_unix_socket_is_one(tmp_path: Path) -> None:
    [[first], [second]] = open_shared(f"unix:{tmp_path}/s", 2)
    with first:
        assert first is second
