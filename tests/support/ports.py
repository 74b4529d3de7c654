"""Ports for servers under test, so that test runs beside one another never get the same."""

from __future__ import annotations

import itertools
import socket

# The kernel gives ports above these to processes that connect or bind to port 0.
FIRST, END = 10_000, 32_000
BLOCK = 200  # ports for one process; more than one test module has servers


def find_free_port() -> int:
    """Returns a loopback TCP port that nobody listens on and no other test process returns."""
    for port in itertools.islice(_ports, BLOCK):
        with socket.socket() as probe:
            # Connections that have ended keep a port for a minute; servers do not mind them.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if _bound(probe, port):
                return port
    raise AssertionError(f"all ports near {next(_ports)} are in use")


def _take_block() -> tuple[socket.socket, range]:
    """Takes a block of ports; that its first one stays bound is what keeps others away."""
    for first in range(FIRST, END, BLOCK):
        claim = socket.socket()
        if _bound(claim, first):
            return claim, range(first + 1, first + BLOCK)
        claim.close()
    raise AssertionError(f"no block of ports is free between {FIRST} and {END}")


def _bound(made: socket.socket, port: int) -> bool:
    try:
        made.bind(("127.0.0.1", port))
    except OSError:  # it is in use
        return False
    return True


# At import, as tests count the descriptors that are open before and after.
_claim, _block = _take_block()
_ports = itertools.cycle(_block)  # the longest unused comes first
