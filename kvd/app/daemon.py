"""The daemon: everything it runs, in the order it starts, and the reverse in which it stops.

    root: SIGTERM and SIGINT, before anything else that may wait
    background: reloads, sweep of removed ranks, expiry of requests, trimming of heaps, watchdog
     └ listeners: one task per registered rank                      stop last
        └ start-up: recovery from a peer, the gate
        └ faces: one front per bind, TLS beside it                  stop first

The faces answer from the first moment. Listeners connect when they are registered and take
messages once the gate opens: after a peer's state is in, and as many instances are registered as
were asked for.

SIGTERM and SIGINT drain: requests under way are answered, then the listeners end, exit code 0. A
start that still waits, for a name or a file, is given up. A second signal ends the process at once.
SIGHUP and `kvd reload` have the files read again, all of them or none; without any, SIGHUP is not
caught. An exception that reaches a nursery here is a bug: the daemon dies with its traceback, and
whoever supervises it starts it again.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, nullcontext
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import trio

from kvd._version import VERSION
from kvd.app import control
from kvd.app.api_server import read_files
from kvd.app.apis import Apis, Components
from kvd.app.control import ReloadResult
from kvd.app.index_full_log import IndexFullLog
from kvd.app.unmatched_log import UnmatchedLog
from kvd.config.load import Config, Prepared, StartError, exposed_secrets
from kvd.config.reload import Reader, Reloaded
from kvd.fleet_file.follower import FleetFileFollower
from kvd.http.certificates import TlsCredentials
from kvd.http.listeners import file_remover
from kvd.index.capacity import ListenerCapacity
from kvd.index.partitions import State
from kvd.index.peers import Peers
from kvd.index.publishers import Publishers
from kvd.index.registry import Registry
from kvd.net.curve import KeyPair
from kvd.net.dialing import Dialer
from kvd.net.listeners import ListenerTasks
from kvd.net.recovery import RecoveryStats, recover, settle
from kvd.net.zsocket import make_context
from kvd.platform import activation, sdnotify
from kvd.platform.descriptors import LEAST, listeners_within, raise_limit, waiting_within
from kvd.platform.memory import Heaps, keep_freed_memory
from kvd.platform.signals import Signals
from kvd.replica_sync.plane import ReplicaSync
from kvd.selection.readiness import Readiness, Recovery
from kvd.selection.service import Selections
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry import logs
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family, by_label, counter, gauge
from kvd.wire.egress import EgressPolicy
from kvd_core.zmq.drain import InboxSpace

if TYPE_CHECKING:
    from kvd.net.zsocket import Context

EXIT_SECOND_SIGNAL = 130

# Steps of a sweep's slice, each at most about 0.1 µs: the memory of a removed or cleared rank comes
# back in slices of under 1 ms.
SWEEP_STEPS = 8192
SWEEP_PAUSE_S = 0.05  # pause between two sweeps when nothing is left to free

EXPIRY_PAUSE_S = 1.0  # pause between two looks for requests that are too old

# Little here is cyclic garbage, and a full collection looks at all that listeners are made of:
# 40 ms at 400 of them. Allocations for a small collection, small ones for a middle one, and those
# for a full one.
GC_THRESHOLDS = (5_000, 50, 100)

log = get_logger(__name__)


def run(config: Config, reader: Reader) -> int:
    """Runs until a signal ends it and returns the exit code; raises StartError."""
    faulthandler.enable()  # the watchdog kills with SIGABRT: the journal says where the loop was
    keep_freed_memory()
    limit = raise_limit()
    if limit < LEAST:
        raise StartError(f"{limit} descriptors are too few, kvd needs {LEAST} (ulimit -n)")
    max_ranks = listeners_within(limit)
    if len(config.workers) > max_ranks:
        raise StartError(f"the descriptors (ulimit -n) allow only {max_ranks} workers")
    try:
        passed = activation.receive(os.environ)
    except ValueError as error:
        raise StartError(str(error)) from None
    daemon = _Daemon(config, max_ranks, waiting_within(limit), reader)
    with (
        closing(passed),
        closing(Signals(signal.SIGTERM, signal.SIGINT)) as ends,
        closing(Signals(*((signal.SIGHUP,) if daemon.reloads else ()))) as reloads,
    ):
        return trio.run(daemon.run, passed, ends, reloads)


class _Daemon:
    """One process's daemon."""

    def __init__(self, config: Config, max_ranks: int, max_waiting: int, reader: Reader) -> None:
        self._config = config
        self._reader = reader
        self._heaps = Heaps()
        self._reloads = {"applied": 0, "refused": 0}
        self._reloading = trio.Lock()
        self._control: socket.socket | None = None
        self._max_ranks = max_ranks
        self._max_waiting = max_waiting
        self._state = State(config.hash_seed, config.index_max_blocks, config.max_partitions)
        self._outgoing = EgressPolicy(config.outgoing_allow)
        self._keys = None if config.curve.secret is None else KeyPair(config.curve.secret)
        self._dialer = Dialer(
            self._outgoing,
            config.outgoing_lookup_s,
            config.outgoing_lookup_every_s,
            keys=self._keys,
        )
        self._listeners: ListenerTasks | None = None
        self._waiting = InboxSpace(config.queues_messages, config.queues_bytes)
        self._sync = ReplicaSync(config, self._outgoing, self._dialer, self._keys, self._waiting)
        self._peers = Peers(config.peers, self._outgoing)
        self._recovery = RecoveryStats()
        self._ledgers = Ledgers(config.max_requests, config.max_request_blocks)
        self._slots = SlotTrackers(config.request_expiry_s, self._ledgers, config.max_partitions)
        self._selections: Selections | None = None
        self._publishers: Publishers | None = None
        self._services = Apis(config)
        self._fleet: FleetFileFollower | None = None
        self._recovered = trio.Event()  # or given up, or there was nobody to recover from
        self._serving = trio.Event()  # all faces; from then on there is time to connect to engines
        self._signalled = trio.Event()
        self._starting = trio.CancelScope()  # around what may wait before that
        self._announced = False  # to the service manager

    @property
    def reloads(self) -> bool:
        """Whether there is anything to read again."""
        config = self._config
        keys = config.curve.replicas is not None
        files = config.policy.tokens, config.fleet_file, keys, config.tls
        return self._reader.has_file or any(files)

    async def run(self, passed: activation.Passed, ends: Signals, reloads: Signals) -> int:
        fault: StartError | None = None
        async with trio.open_nursery() as root:
            root.start_soon(self._watch_ends, ends)
            try:
                await self._run(passed, reloads)
            except StartError as error:  # by itself, not in a group
                fault = error
            root.cancel_scope.cancel()
        if fault is not None:
            raise fault
        log.info("stopped")
        return 0

    async def _open(self, opened: ExitStack, passed: activation.Passed, context: Context) -> None:
        """Opens the ports of the faces and of replica sync; raises StartError."""
        for face, binds in self._services.binds.items():
            await face.open(opened, self._config, binds, passed)
        if passed.left():  # their clients would wait for ever
            raise StartError(
                "the service manager passes sockets that belong to no face: "
                f"{', '.join(passed.left())}; give each the address or the name of a face"
            )
        if (path := control.path(self._reader.environ)) is not None:
            self._control = opened.enter_context(await control.listen(path))
            opened.callback(file_remover(self._control))
        self._warn_of_secrets()
        if self._keys is not None:
            log.info("curve_key", public_key=self._keys.public.decode())
        await self._sync.open(context)

    async def _run(self, passed: activation.Passed, reloads: Signals) -> None:
        config = self._config
        context = make_context()
        with ExitStack() as opened:
            opened.callback(context.destroy, linger=0)
            with self._until_signalled():
                await self._open(opened, passed, context)
            if self._signalled.is_set():
                return
            async with self._background(reloads), trio.open_nursery() as listening:
                ready = trio.Event()
                self._listeners = tasks = ListenerTasks(
                    listening,
                    context,
                    ready,
                    config.engine_link,
                    config.replays,
                    dialer=self._dialer,
                    begin=self._serving,
                    space=self._waiting,
                )
                bounds = ListenerCapacity(self._max_ranks), self._outgoing, config.engine_stale_s
                registry = Registry(self._state, tasks, *bounds)
                if config.indexer_bind is not None:
                    for worker in config.workers:
                        registry.register(
                            worker.key, worker.endpoint, worker.block_size, worker.replay_endpoint
                        )
                self._publishers = publishers = Publishers(self._state, tasks, *bounds)
                self._selections = Selections(
                    self._state,
                    registry,
                    config.router,
                    config.request_expiry_s,
                    Random(),
                    trio.current_time,
                    time.time_ns,
                    self._ledgers,
                    Readiness(config.min_initial_workers, len(config.peers)),
                    self._max_waiting,
                )
                if config.selection_bind is not None:
                    for record in config.catalog:
                        await self._selections.workers.put(record)
                known = Components(
                    self._state,
                    registry,
                    self._peers,
                    self._recovery,
                    publishers,
                    self._slots,
                    self._selections,
                    self._sync.start(listening, context, self._slots, self._selections),
                )
                with self._until_signalled():
                    await self._start_fleet_file(listening, known)
                indexing = config.indexer_bind, config.selection_bind, config.conductor_bind
                if any(bind is not None for bind in indexing):
                    listening.start_soon(self._start_up, registry, tasks, ready)
                else:
                    self._recovered.set()
                if not self._signalled.is_set():
                    await self._serve(known)
                listening.cancel_scope.cancel()

    @contextmanager
    def _until_signalled(self) -> Iterator[None]:
        """Gives up a part of the start at the first signal."""
        with trio.CancelScope() as self._starting:
            if self._signalled.is_set():
                self._starting.cancel()
            yield

    @asynccontextmanager
    async def _background(self, reloads: Signals) -> AsyncIterator[None]:
        """Runs what lives as long as the daemon."""
        async with trio.open_nursery() as root:
            root.start_soon(self._watch_reloads, reloads)
            if self._control is not None:
                root.start_soon(control.answer, self._control, self._reload)
            root.start_soon(self._sweep)
            root.start_soon(self._expire)
            root.start_soon(self._heaps.run)
            root.start_soon(sdnotify.feed_watchdog, lambda: not self._recovered.is_set())
            yield
            root.cancel_scope.cancel()

    async def _watch_ends(self, ends: Signals) -> None:
        """Begins to stop at the first signal."""
        number = await ends.wait()
        log.info("stopping", signal=number.name)
        sdnotify.tell(sdnotify.STOPPING)
        self._signalled.set()
        self._starting.cancel()
        await ends.wait()
        os._exit(EXIT_SECOND_SIGNAL)  # whoever asks twice does not want to wait

    async def _watch_reloads(self, reloads: Signals) -> None:
        """Reloads at each signal; one that comes meanwhile has it done once more."""
        while True:
            await reloads.wait()
            await self._reload()

    def _is_ready(self) -> bool:
        """Says whether the service manager takes kvd for started, and not for stopping."""
        return self._announced and not self._signalled.is_set()

    async def _reload(self) -> ReloadResult:
        """Reloads, one at a time, and keeps the service manager posted."""
        async with self._reloading:
            if self._is_ready():
                sdnotify.tell_reloading()
            verdict = await self._take_over()
            await self._dialer.recheck()
            if self._is_ready():
                await sdnotify.tell_ready()
            return verdict

    async def _take_over(self) -> ReloadResult:
        """Takes over what all files say now, or nothing, and says what is wrong with them."""
        try:
            async with nullcontext() if self._fleet is None else self._fleet.reloading():
                parts, waiting = await self._prepare()
        except StartError as error:
            self._reloads["refused"] += 1
            log.error("reload_refused", reason=error)
            return ReloadResult(refused=str(error))
        for part in parts:  # in one step: no request sees half of it
            part.commit()
        self._reloads["applied"] += 1
        changed = tuple(name for part in parts for name in part.changed)
        log.info("reloaded", changed=" ".join(changed))
        self._warn_of_secrets()
        if waiting:
            log.warning("restart_needed", settings=" ".join(waiting))
        return ReloadResult(changed, waiting)

    def _warn_of_secrets(self) -> None:
        if paths := exposed_secrets(self._config):
            log.warning("secrets_exposed", files=" ".join(map(str, paths)))

    async def _prepare(self) -> tuple[list[Prepared], tuple[str, ...]]:
        """Returns the parts of a reload, and settings that wait for a restart; raises StartError.

        Nothing has changed until all parts are there.
        """
        # Thousands of workers take half a second, and a file may be on another machine.
        reloaded, terms = await trio.to_thread.run_sync(
            self._read_again, self._config, abandon_on_cancel=True
        )
        if self._signalled.is_set():
            raise StartError("kvd is stopping")
        config = reloaded.config
        for face in self._services.served:
            face.check_open(config)
        parts = [Prepared(reloaded.changed, partial(self._apply_config, config, terms))]
        if self._fleet is not None:
            parts.append(await self._fleet.prepare(config.outgoing_allow))
        return parts, reloaded.waiting

    def _read_again(self, running: Config) -> tuple[Reloaded, TlsCredentials | None]:
        reloaded = self._reader.again(running)
        tls = reloaded.config.tls
        return reloaded, None if tls is None else read_files(tls)

    def _apply_config(self, config: Config, terms: TlsCredentials | None) -> None:
        """Has the daemon go on with other values of settings that are live, and terms of TLS."""
        self._config = config
        logs.set_output(config.log_level, config.log_format)
        self._outgoing.allow(config.outgoing_allow)
        self._dialer.lookup_s = config.outgoing_lookup_s
        self._dialer.look_again_s = config.outgoing_lookup_every_s
        if self._listeners is not None:
            self._listeners.set_replay_options(config.replays)
        self._state.budget.max_blocks = config.index_max_blocks
        self._state.max_partitions = self._slots.max_trackers = config.max_partitions
        self._sync.apply_config(config)
        for face in self._services.served:
            face.set_limits(config.http)
            face.set_policy(config)
            if terms is not None:
                face.set_credentials(terms)
            face.log_requests(config.access_log)
        self._slots.expiry_s = config.request_expiry_s
        if self._selections is not None:
            self._selections.reload(config.router, config.request_expiry_s)

    async def _sweep(self) -> None:
        """Takes back memory of ranks that have gone, and writes lines of the log that wait."""
        while True:
            logs.flush()
            states = {self._state}
            if self._selections is not None:
                states.add(self._selections.state)
            more = [state.sweep(SWEEP_STEPS) for state in states]
            if any(more):
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(SWEEP_PAUSE_S)

    async def _expire(self) -> None:
        """Looks every second for what is too old, of no use, too full, or never matches."""
        index_full = IndexFullLog(self._state.budget)
        unmatched = UnmatchedLog(self._state)
        while True:
            await trio.sleep(EXPIRY_PAUSE_S)
            index_full.check(trio.current_time())
            for _ in unmatched.check():
                await trio.lowlevel.checkpoint()
            for _ in self._slots.expire(trio.current_time()):
                await trio.lowlevel.checkpoint()
            if self._publishers is not None:
                for _ in self._publishers.check_unused():
                    await trio.lowlevel.checkpoint()
            if self._selections is not None:
                for _ in self._selections.run_due(trio.current_time()):
                    await trio.lowlevel.checkpoint()

    async def _start_up(self, registry: Registry, tasks: ListenerTasks, ready: trio.Event) -> None:
        """Fills the index from a peer and opens the gate."""
        config = self._config
        if config.peers:
            await self._serving.wait()
            await tasks.entered()
            await trio.sleep(config.recovery_delay_s)
            asked = self._state, config.peers, self._recovery
            token, dialer = config.peers_token, self._dialer
            limits = config.recovery
            recovered = await recover(*asked, limits, token=token, dialer=dialer) is not None
            if not recovered:
                log.warning("recovery_failed", peers=len(config.peers))
            self._note_recovery(recovered)
            gc.freeze()  # it stays: 65,536 workers were 16 ms of every full collection
        self._recovered.set()
        if registry.instances() < config.min_initial_workers:
            log.info("waiting_for_workers", minimum=config.min_initial_workers)
        await registry.wait_for_instances(config.min_initial_workers)
        ready.set()
        log.info("ready", workers=registry.instances())
        await settle(self._state, registry)

    def _note_recovery(self, recovered: bool) -> None:
        if self._selections is not None:
            readiness = self._selections.readiness
            readiness.recovery = Recovery.DONE if recovered else Recovery.EMPTY
            readiness.recovered_blocks = self._recovery.blocks

    async def _start_fleet_file(self, nursery: trio.Nursery, known: Components) -> None:
        """Registers who is in the fleet file, and goes on to follow it."""
        config = self._config
        if config.fleet_file is None:
            return
        targets = self._services.targets(known)
        self._fleet = FleetFileFollower(config.fleet_file, self._outgoing, targets)
        await self._fleet.read()
        nursery.start_soon(self._fleet.run)

    def _own_families(self) -> Iterator[Family]:
        """Yields what the process counts of itself, on every face."""
        name, help = (
            "kvd_config_reloads_total",
            "Number of reloads of the configuration, by outcome",
        )
        yield by_label(name, "counter", help, "outcome", self._reloads)
        help = "Number of unapplied messages of engines and replicas"
        yield gauge("kvd_queued_messages", help, self._waiting.messages)
        yield gauge(
            "kvd_queued_bytes",
            "Total size of the unapplied messages of engines and replicas in bytes",
            self._waiting.size_bytes,
        )
        yield from self._heaps.metrics()
        help = "Number of log lines dropped because stderr could not take them"
        yield counter("kvd_log_lines_dropped_total", help, logs.dropped())

    def _outgoing_families(self) -> Iterator[Family]:
        outgoing = self._outgoing
        name, help = (
            "kvd_outgoing_refused_total",
            "Number of outgoing addresses refused, by stage",
        )
        stages = {"named": outgoing.refused_names, "connecting": outgoing.refused_connections}
        yield by_label(name, "counter", help, "at", stages)

    async def _serve(self, known: Components) -> None:
        """Serves the faces until a signal, then until what is under way is answered."""
        stop = trio.Event()
        async with trio.open_nursery() as serving:
            for face, routes, not_found in self._services.routes(known, lambda: self._config):
                face.sources.append(self._own_families)
                face.sources.append(self._outgoing_families)
                face.sources.append(self._sync.families)
                if self._fleet is not None:
                    face.sources.append(self._fleet.families)
                face.log_requests(self._config.access_log)
                await serving.start(face.serve, routes, not_found, stop)
                bind = " ".join(face.addresses())
                log.info("serving", version=VERSION, face=face.name, bind=bind)
            self._serving.set()
            serving.start_soon(self._announce)
            # What exists now stays: the garbage collector need not look at it ever again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            await self._signalled.wait()
            if self._selections is not None:
                self._selections.scheduler.stop()
            self._recovered.set()  # nobody waits for it any more
            stop.set()

    async def _announce(self) -> None:
        """Tells systemd that the faces serve, with what a peer knew if there is one."""
        await self._recovered.wait()
        if not self._signalled.is_set():
            self._announced = True
            await sdnotify.tell_ready()
