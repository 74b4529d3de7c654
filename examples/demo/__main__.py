"""Starts `kvd serve` in front of two simulated engines, and shows it at work until a signal.

SIGINT and SIGTERM end the daemon, then the engines; a second signal ends both at once. Exit codes:
that of the daemon, 1 if it refuses the engines, 2 for an address that the demo cannot use.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from urllib.parse import urlsplit

import trio

from examples.demo.client import HungUp
from examples.demo.daemon import Daemon
from examples.demo.display import Addresses
from examples.demo.traffic import run_traffic, simulated_engines

# For each address: its flag, its default, and what it is the address of.
GATEWAY = ("gateway-bind", "127.0.0.1:8080", "gateway")
INDEXER = ("indexer-bind", "127.0.0.1:8090", "KV indexer")
HANG_UP_S = 5.0  # time for a daemon's process to end after it has hung up
EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m examples.demo",
        description="Starts kvd in front of two simulated engines and shows it at work.",
        epilog="All other flags are those of `kvd serve`.",
        allow_abbrev=False,
    )
    for flag, default, what in (GATEWAY, INDEXER):
        variable = "KVD_" + flag.replace("-", "_").upper()
        parser.add_argument(
            f"--{flag}",
            metavar="HOST:PORT",
            default=os.environ.get(variable) or default,
            help=f"address of the {what} (default ${variable}, then {default})",
        )
    args, others = parser.parse_known_args(argv)
    binds: tuple[str, str] = args.gateway_bind, args.indexer_bind
    for (flag, _, _), bind in zip((GATEWAY, INDEXER), binds, strict=True):
        if not is_host_and_port(bind):
            parser.error(f"the demo needs a --{flag} of HOST:PORT, not {bind}")
    try:
        return trio.run(run, binds, others)
    except KeyboardInterrupt:  # a second signal, or one before signals were awaited
        return EXIT_INTERRUPTED


def is_host_and_port(bind: str) -> bool:
    try:
        url = urlsplit(f"http://{bind}")
        return bool(url.hostname and url.port) and url.netloc == bind
    except ValueError:  # the text after a colon is no port
        return False


async def run(binds: tuple[str, str], others: Sequence[str]) -> int:
    """Runs the demo with gateway and KV indexer at these addresses; returns the exit code."""
    refusal = None
    gateway, indexer = binds
    addresses = Addresses(f"http://{gateway}", f"http://{indexer}")
    places = ["--gateway-bind", gateway, "--indexer-bind", indexer]
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with simulated_engines() as (engines, urls):
            arguments = [*others, *places, "--upstreams", ",".join(urls)]
            with closing(Daemon(arguments)) as daemon:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(end_on_signal, signals, nursery.cancel_scope)
                    nursery.start_soon(end_with, daemon, nursery.cancel_scope)
                    await daemon.ready()
                    try:
                        refusal = await run_traffic(addresses, engines)
                    except* HungUp:  # the daemon is ending, and its end cancels this
                        await trio.sleep(HANG_UP_S)
                        raise
                    nursery.cancel_scope.cancel()
                code = await daemon.stop()
    if refusal is not None:
        print(f"demo: {refusal}", file=sys.stderr)
        return EXIT_REFUSED
    return code


async def end_on_signal(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(signals)
    scope.cancel()


async def end_with(daemon: Daemon, scope: trio.CancelScope) -> None:
    await daemon.ended()
    scope.cancel()


if __name__ == "__main__":
    sys.exit(main())
