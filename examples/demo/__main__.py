"""Starts `kvd serve` with the flags given, and shows it at work until a signal.

SIGINT and SIGTERM end the engines, then the daemon; a second signal ends both at once. Exit codes:
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
from examples.demo.traffic import run_traffic

DEFAULT_BIND = "127.0.0.1:8090"  # that of kvd's indexer
HANG_UP_S = 5.0  # at most this long after a daemon's last answer its process ends
EXIT_REFUSED = 1
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m examples.demo",
        description="Starts kvd with two simulated engines and shows it at work.",
        epilog="All other flags are those of `kvd serve`.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--indexer-bind",
        metavar="HOST:PORT",
        default=os.environ.get("KVD_INDEXER_BIND") or DEFAULT_BIND,
        help=f"address of the KV indexer (default $KVD_INDEXER_BIND, then {DEFAULT_BIND})",
    )
    args, others = parser.parse_known_args(argv)
    bind: str = args.indexer_bind
    if not is_host_and_port(bind):
        parser.error(f"the engines need an --indexer-bind of HOST:PORT, not {bind}")
    try:
        with closing(Daemon([*others, "--indexer-bind", bind])) as daemon:
            return trio.run(run, daemon, f"http://{bind}")
    except KeyboardInterrupt:  # the second one, or before the first was waited for
        return EXIT_INTERRUPTED


def is_host_and_port(bind: str) -> bool:
    try:
        url = urlsplit(f"http://{bind}")
        return bool(url.hostname and url.port) and url.netloc == bind
    except ValueError:  # what stands after a colon is no port
        return False


async def run(daemon: Daemon, base_url: str) -> int:
    """Runs the demo on a daemon that has just been started; returns the exit code."""
    refusal = None
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_on_signal, signals, nursery.cancel_scope)
            nursery.start_soon(end_with, daemon, nursery.cancel_scope)
            await daemon.ready()
            try:
                refusal = await run_traffic(base_url)
            except* HungUp:  # a daemon that ends hangs up, and its end cancels this
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
