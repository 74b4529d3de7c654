"""A bound that is reached refuses what is over it, counts it, and lifts by itself."""

from __future__ import annotations

import resource
import socket
from contextlib import ExitStack

import trio
from serving import Client, Running, open_descriptors, serving


async def test_connections_over_the_bound_are_answered_503() -> None:
    async with serving(connections=500) as running:
        with ExitStack() as opened:
            sockets = [opened.enter_context(_connect(running)) for _ in range(600)]
            await running.until(connections_total=600)
            assert running.front.stats.connections_open == 500
            assert running.front.stats.connections_refused == 100
            for sock in sockets[500:]:
                client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock)))
                reply = await client.read_reply()
                assert (reply.status, reply.persists()) == (503, False)
                assert reply.body == b'{"error": "too many connections"}'
            kept = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sockets[0])))
            assert (await kept.request("GET", "/health")).status == 200
        await running.until_empty()
        async with running.client() as client:
            assert (await client.request("GET", "/health")).status == 200


def _connect(running: Running) -> socket.socket:
    """Connects by the backlog alone, without letting the server run."""
    return socket.create_connection(running.address)


async def test_a_shortage_of_descriptors_pauses_accepting() -> None:
    async with serving() as running, running.client() as early:
        assert (await early.request("GET", "/health")).status == 200
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with ExitStack() as opened:
            sockets = [opened.enter_context(_connect(running)) for _ in range(40)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_descriptors() + 10, hard))
            try:
                await running.until(accept_pauses=2)
                assert running.front.stats.connections_open < 40
                assert (await early.request("GET", "/health")).status == 200
                for sock in sockets[:30]:  # as they leave, the others come in
                    sock.close()
                await running.until(connections_total=41)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            last = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sockets[-1])))
            assert (await last.request("GET", "/health")).status == 200
