"""Ports for servers under test; test runs beside one another never get the same ones."""

from __future__ import annotations

import itertools
import socket

# The kernel gives ports above these to processes that connect or bind to port 0.
FIRST, END = 10_000, 32_000
BLOCK = 200  # ports for one process, which may run several modules with servers


def find_free_port() -> int:
    """Returns a loopback TCP port that nobody listens on and no other test process returns."""
    for port in itertools.islice(_ports, BLOCK):
        with socket.socket() as probe:
            # A closed connection keeps its port for a minute; servers can bind it all the same.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if _bound(probe, port):
                return port
    raise AssertionError(f"all ports near {next(_ports)} are in use")


def _take_block() -> tuple[socket.socket, range]:
    """Takes a block of ports; its first port stays bound, so that no other process takes it."""
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


# Taken at import, as tests compare the number of open descriptors before and after.
_claim, _block = _take_block()
_ports = itertools.cycle(_block)  # the longest unused port comes first
