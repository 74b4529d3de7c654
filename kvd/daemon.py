"""The daemon: everything it runs, in the order it starts, and the reverse in which it stops.

    root: signals, sweep of removed ranks, watchdog
     └ listeners: one task per registered rank                      stop last
        └ start-up: recovery from a peer, the gate
        └ faces: one front per bind, TLS beside it, the demo        stop first

The faces answer from the first moment. Listeners connect when they are registered and take
messages once the gate opens: after a peer's state is in, and as many instances are registered as
were asked for.

SIGTERM and SIGINT drain: requests under way are answered, then the listeners end, exit code 0. A
second signal ends the process at once. An exception that reaches a nursery here is a bug: the
daemon dies with its traceback, and whoever supervises it starts it again.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager

import trio

from kvd._version import VERSION
from kvd.config import Config, StartError, TlsListener
from kvd.demo import DemoStats, run_demo
from kvd.descriptors import listeners_within, raise_limit
from kvd.faces import indexer
from kvd.http.app import build_app
from kvd.http.front import Front
from kvd.http.listeners import open_listeners
from kvd.http.tls import TlsServer
from kvd.logs import get_logger
from kvd.memory import keep_freed_memory
from kvd.metrics import Family, RequestMetrics, Source, by_label, counter, gauge, stats_families
from kvd.net import sdnotify
from kvd.net.link import LinkOptions
from kvd.net.listeners import ListenerTasks
from kvd.net.recovery import RecoveryStats, recover, settle
from kvd.net.zsocket import make_context
from kvd.peers import Peers
from kvd.registry import Registry
from kvd.state import State

EXIT_SECOND_SIGNAL = 130

# A removed or cleared rank is invisible at once; its memory comes back in slices of under 1 ms.
SWEEP_STEPS = 8192  # of at most about 0.1 us
SWEEP_PAUSE_S = 0.05

# Little here is cyclic garbage, and a full collection looks at all that listeners are made of:
# 40 ms at 400 of them. Allocations for a small collection, small ones for a middle one, and those
# for a full one.
GC_THRESHOLDS = (5_000, 50, 100)

log = get_logger(__name__)


def run(config: Config) -> int:
    """Runs until a signal ends it and returns the exit code; raises StartError."""
    keep_freed_memory()
    max_ranks = listeners_within(raise_limit())
    if len(config.workers) > max_ranks:
        raise StartError(f"there are descriptors for {max_ranks} workers only (ulimit -n)")
    return trio.run(_Daemon(config, max_ranks).run)


class _Daemon:
    """One process's daemon."""

    def __init__(self, config: Config, max_ranks: int) -> None:
        self._config = config
        self._max_ranks = max_ranks
        self._state = State()
        self._peers = Peers(config.peers)
        self._recovery = RecoveryStats()
        self._signalled = trio.Event()

    async def run(self) -> int:
        with ExitStack() as opened:
            # Here, so that an address in use is one line and not a group of exceptions.
            sockets = await _open(opened, str(self._config.indexer_bind))
            tls_sockets = await _open_tls(opened, self._config.indexer_tls)
            return await self._run(sockets, tls_sockets)

    async def _run(self, sockets: list[socket.socket], tls_sockets: list[socket.socket]) -> int:
        config = self._config
        context = make_context()
        try:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async with self._background(signals), trio.open_nursery() as listening:
                    ready = trio.Event()
                    options = LinkOptions(
                        heartbeat_s=config.engine.heartbeat_s,
                        heartbeat_timeout_s=config.engine.heartbeat_timeout_s,
                        queue_messages=config.engine.queue_messages,
                    )
                    tasks = ListenerTasks(listening, context, ready, options)
                    registry = Registry(self._state, tasks, self._max_ranks)
                    for worker in config.workers:
                        registry.register(worker.key, worker.endpoint, worker.block_size, None)
                    listening.start_soon(self._start_up, registry, ready)
                    await self._serve(registry, sockets, tls_sockets)
                    listening.cancel_scope.cancel()
        finally:
            context.destroy(linger=0)
        log.info("stopped")
        return 0

    @asynccontextmanager
    async def _background(self, signals: AsyncIterator[int]) -> AsyncIterator[None]:
        """Runs what lives as long as the daemon."""
        async with trio.open_nursery() as root:
            root.start_soon(self._watch_signals, signals)
            root.start_soon(self._sweep)
            root.start_soon(_feed_watchdog)
            yield
            root.cancel_scope.cancel()

    async def _watch_signals(self, signals: AsyncIterator[int]) -> None:
        async for number in signals:
            if self._signalled.is_set():
                os._exit(EXIT_SECOND_SIGNAL)  # whoever asks twice does not want to wait
            log.info("stopping", signal=signal.Signals(number).name)
            _notify(sdnotify.STOPPING)
            self._signalled.set()

    async def _sweep(self) -> None:
        while True:
            if self._state.sweep(SWEEP_STEPS):
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(SWEEP_PAUSE_S)

    async def _start_up(self, registry: Registry, ready: trio.Event) -> None:
        """Fills the index from a peer and opens the gate."""
        config = self._config
        if config.peers:
            await trio.sleep(config.recovery_delay_s)
            if await recover(self._state, config.peers, self._recovery) is None:
                log.warning("no peer to recover from", peers=len(config.peers))
            gc.freeze()  # it stays: 65,536 workers were 16 ms of every full collection
        if registry.instances() < config.min_initial_workers:
            log.info("waiting for workers", minimum=config.min_initial_workers)
        await registry.wait_for_instances(config.min_initial_workers)
        ready.set()
        log.info("ready", workers=registry.instances())
        await settle(self._state, registry)

    def _families(self, front: Front) -> Iterator[Family]:
        """Yields what only the daemon knows."""
        stats = self._recovery
        help = "Attempts to take a peer's state, by outcome"
        name = "kvd_recovery_attempts_total"
        yield by_label(name, "counter", help, "outcome", stats.attempts)
        yield gauge("kvd_recovery_blocks", "Blocks taken from a peer", stats.blocks)
        yield gauge("kvd_recovery_seconds", "Time that took", stats.seconds)
        help = "Peers refused at the bound"
        yield counter("kvd_peers_refused_total", help, self._peers.refused)
        help = "HTTP server, plain port"
        yield from stats_families("kvd_http", front.stats, help, frozenset({"connections_open"}))

    async def _serve(
        self,
        registry: Registry,
        sockets: list[socket.socket],
        tls_sockets: list[socket.socket],
    ) -> None:
        """Serves the faces until a signal, then until what is under way is answered."""
        config = self._config
        requests = RequestMetrics()
        sources: list[Source] = []
        routes = indexer.routes(
            self._state,
            registry,
            self._peers,
            requests,
            sources,
            test_endpoints=config.test_endpoints,
        )
        app = build_app(routes, config.http, requests.observe)
        front = Front(routes, app, config.http, requests.observe)
        sources.append(lambda: self._families(front))
        stop = trio.Event()
        async with trio.open_nursery() as faces:
            await faces.start(front.serve, sockets, stop)
            if config.indexer_tls is not None:
                tls = config.indexer_tls
                server = TlsServer(app, tls.certfile, tls.keyfile, config.http)
                sources.append(lambda: _tls_families(server))
                await faces.start(server.serve, tls_sockets, stop)
            addresses = [_address(sock) for sock in sockets]
            log.info("serving", version=VERSION, face="indexer", bind=" ".join(addresses))
            _notify(sdnotify.READY)
            # What exists now stays: the garbage collector need not look at it ever again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            if config.demo:
                await self._run_demo(f"http://{addresses[0]}", front)
            await self._signalled.wait()
            stop.set()

    async def _run_demo(self, base_url: str, front: Front) -> None:
        """Runs the demo until a signal."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: run_demo(base_url, stats=lambda: self._totals(front)))
            await self._signalled.wait()
            nursery.cancel_scope.cancel()

    def _totals(self, front: Front) -> DemoStats:
        ingest = self._state.ingest.as_dict()
        indexes = [partition.index for partition in self._state.partitions.values()]
        return DemoStats(
            events=ingest["stored"] + ingest["removed"] + ingest["cleared"],
            blocks=sum(index.stats()["blocks"] for index in indexes),
            queries=front.stats.requests - front.stats.requests_app,
        )


async def _open(opened: ExitStack, bind: str) -> list[socket.socket]:
    try:
        sockets = await open_listeners(bind)
    except (OSError, ValueError) as error:
        raise StartError(str(error.strerror if isinstance(error, OSError) else error)) from None
    for sock in sockets:
        opened.enter_context(sock)
    return sockets


async def _open_tls(opened: ExitStack, tls: TlsListener | None) -> list[socket.socket]:
    """Opens the HTTPS port, if there is to be one, after a look at what it is to show."""
    if tls is None:
        return []
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certfile, tls.keyfile)
    except OSError as error:
        raise StartError(f"cannot use {tls.certfile} with {tls.keyfile}: {error}") from None
    return await _open(opened, str(tls.bind))


def _tls_families(server: TlsServer) -> Iterator[Family]:
    gauges = frozenset({"connections_open"})
    return stats_families("kvd_https", server.stats, "HTTP server, TLS port", gauges)


def _address(sock: socket.socket) -> str:
    name = sock.getsockname()
    if isinstance(name, str):
        return f"unix:{name}"
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _notify(message: bytes) -> None:
    address = os.environ.get("NOTIFY_SOCKET")
    if address:
        sdnotify.notify(message, address)


async def _feed_watchdog() -> None:
    """Tells systemd that this loop turns, twice as often as it wants to know."""
    limit_us = os.environ.get("WATCHDOG_USEC")
    if limit_us is None:
        return
    while True:
        _notify(sdnotify.WATCHDOG)
        await trio.sleep(int(limit_us) / 2_000_000)
