"""The daemon: everything it runs, in the order in which it starts; it stops in the reverse order.

    root: SIGTERM and SIGINT, before anything else that may wait
    ports opened
    background: reloads, sweep of removed ranks, expiry of requests, trimming of heaps, watchdog
     └ listeners: one task per registered rank, the keeper of state stop last
        └ start-up: our own snapshot or recovery from a peer, the gate
        └ faces: one front per bind, TLS beside it                  stop first

All parts are made at once, when the ports are open and the nurseries are there. The faces answer
from the first moment. Listeners connect when they are registered, and take messages once the gate
opens: after a peer's state is recovered and `min_initial_workers` instances are registered.

SIGTERM and SIGINT drain: requests under way are answered, then the listeners end, and the exit code
is 0. A start that still waits, for a name or a file, is given up. A second signal ends the process
at once. SIGHUP and `kvd reload` read the files again and apply all of them or none; if there are no
files, SIGHUP is not caught. An exception that reaches a nursery here is a bug: the daemon dies with
its traceback, and its supervisor starts it again.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import trio

from kvd._version import VERSION
from kvd.app import assembly, control
from kvd.app.assembly import Opened, Start
from kvd.app.filling import IndexFiller
from kvd.app.index_full_log import IndexFullLog
from kvd.app.ports import Ports
from kvd.app.reloading import Reloader, is_reloadable, warn_of_secrets
from kvd.app.stopping import Stop
from kvd.app.unmatched_log import UnmatchedLog
from kvd.config.errors import StartError
from kvd.config.load import Config
from kvd.config.reload import ConfigReader
from kvd.diagnosis.doctor import Doctor
from kvd.faces.common.diagnosis import diagnose_route, diagnoses_bound
from kvd.faces.explain.routes import Explainer, explain_routes, explanations_bound
from kvd.faces.ui import ui_routes
from kvd.faces.ui.picture import Picture
from kvd.fleet_file.follower import RegistrationTarget
from kvd.fleet_file.targets import UpstreamTarget
from kvd.gateway.siblings import ProcessIdentity
from kvd.gateway.upstreams import CALLS
from kvd.http.idle_poll import busy_wait_families
from kvd.net.link import LinkResources
from kvd.net.listeners import ListenerTasks
from kvd.net.recovery import confirm_restored
from kvd.net.zsocket import make_context
from kvd.persistence.registrations import Registrations
from kvd.platform import activation, sdnotify
from kvd.platform.descriptors import (
    LEAST,
    listeners_within,
    make_room,
    raise_limit,
    waiting_within,
)
from kvd.platform.memory import FrequentCollector, Heaps, keep_freed_memory
from kvd.platform.signals import Signals
from kvd.shared_state.none import NoSharedState
from kvd.telemetry import logs
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family, Source, by_label, counter, gauge, stretch_families
from kvd.telemetry.stretches import UNREGISTRATION, stretches_counted

if TYPE_CHECKING:
    from kvd.shared_state.service import SharedState

# Steps of a sweep's slice, each at most about 0.1 µs: the memory of a removed or cleared rank comes
# back in slices of under 1 ms.
SWEEP_STEPS = 8192
# Pause between two sweeps when nothing is left to free: in an idle process, whose caches are cold,
# a sweep takes 0.3 ms, and an event that comes meanwhile waits.
SWEEP_PAUSE_S = 0.25
LINES_PAUSE_S = 0.05  # the pause while lines of the log wait for their reader

EXPIRY_PAUSE_S = 1.0  # pause between two checks for requests that are too old

# Longest wait of one of several gateway processes for the engines' answers, before it serves.
MEET_S = 5.0

# Allocations before a small collection, small collections before a middle one, and middle ones
# before a full one. Little here is cyclic garbage, and a full collection visits every object of the
# listeners: 40 ms with 400 of them. A middle one visits what the small ones have left: 1,500
# objects, 0.4 ms.
GC_THRESHOLDS = (500, 2, 20_000)

# Longest time for which a thread that runs Python keeps the loop waiting after each system call of
# the loop: threads read fleet files and load modules. With Python's default of 5 ms a stretch of
# some system calls would take tens of milliseconds.
SWITCH_S = 0.0001

log = get_logger(__name__)


def run(
    config: Config,
    reader: ConfigReader,
    passed: activation.PassedSockets | None = None,
    identity: ProcessIdentity | None = None,
) -> int:
    """Runs until a signal ends it and returns the exit code; raises StartError.

    If it is one of several processes, its parent gives it its sockets and its `identity`.
    """
    faulthandler.enable()  # the watchdog kills with SIGABRT: the traceback shows where the loop was
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_S)
    limit = raise_limit()
    if limit < LEAST:
        raise StartError(f"{limit} descriptors are too few, kvd needs {LEAST} (ulimit -n)")
    make_room(limit)
    bounds = assembly.DescriptorBounds(listeners_within(limit), waiting_within(limit))
    if len(config.workers) > bounds.listeners:
        raise StartError(f"the descriptors (ulimit -n) allow only {bounds.listeners} workers")
    try:
        passed = passed or activation.receive(os.environ)
    except ValueError as error:
        raise StartError(str(error)) from None
    hangup = (signal.SIGHUP,) if is_reloadable(config, reader) else ()
    with (
        closing(passed),
        closing(Signals(signal.SIGTERM, signal.SIGINT)) as ends,
        closing(Signals(*hangup)) as reloads,
    ):
        start = Start(config, reader, bounds, passed, identity)
        return trio.run(serve, start, ends, reloads)


async def serve(start: Start, ends: Signals, reloads: Signals) -> int:
    """Serves until a signal of `ends` comes and returns the exit code; raises StartError."""
    stop = Stop()
    fault: StartError | None = None
    async with trio.open_nursery() as root:
        root.start_soon(stop.watch, ends)
        try:
            await _open_and_serve(start, reloads, stop)
        except StartError as error:  # raised below, where no nursery makes a group of it
            fault = error
        root.cancel_scope.cancel()
    if fault is not None:
        raise fault
    log.info("stopped")
    return 0


async def _open_and_serve(start: Start, reloads: Signals, stop: Stop) -> None:
    config, context = start.config, make_context()
    with ExitStack() as stack:
        stack.callback(context.destroy, linger=0)
        ports = Ports(config)
        with stop.interruptible():
            await ports.open(stack, config, start.reader.environ, start.passed, context)
        if stop.is_requested:
            return
        warn_of_secrets(config)
        decisions = assembly.open_decision_log(config, stack)
        opened = Opened(ports, context, decisions, assembly.open_store(config, stack))
        async with trio.open_nursery() as background:
            async with trio.open_nursery() as listening:
                daemon = _Daemon(start, opened, listening, stop)
                daemon.run_in(background, reloads)
                await daemon.serve(listening, background)
                listening.cancel_scope.cancel()
            await daemon.finish()
            background.cancel_scope.cancel()


class _Daemon:
    """The parts of one daemon process, and their start and stop.

    In place of a part that the settings leave out there is one that does nothing.
    """

    def __init__(self, start: Start, opened: Opened, listening: trio.Nursery, stop: Stop) -> None:
        config, ports, decisions = start.config, opened.ports, opened.decisions
        self._stop = stop
        self._ports = ports
        self._heaps = Heaps()
        self._gate = trio.Event()  # once set, listeners take messages
        self._serving = trio.Event()  # all faces serve; only then do listeners connect to engines
        self._recovered = trio.Event()  # also set if recovery was given up, or had no peer
        self._listeners = ListenerTasks(
            listening,
            LinkResources(opened.context, ports.dialer, ports.space),
            self._gate,
            config.engine_link,
            config.replays,
            begin=self._serving,
        )
        accounts = assembly.accounts_of(config, opened.store)
        self._parts = assembly.components(start, opened, self._listeners, listening, accounts)
        self._targets = ports.apis.targets(self._parts)
        self._fleet = assembly.fleet_file_of(config, ports, self._targets)
        registrations = assembly.registrations_of(self._parts, config, self._fleet)
        self._keeper = assembly.keeper_of(
            opened.store, self._parts, accounts.ledgers, registrations
        )
        self._shared = self._share(config, accounts, registrations)
        self._diagnoses = diagnoses_bound()
        self._explanations = explanations_bound()
        diagnosed = assembly.diagnosed(self._parts, ports, self._keeper, decisions, self._fleet)
        self._doctor = Doctor(diagnosed, ports.dialer, trio.current_time(), self._shared.shown)
        self._picture = Picture(assembly.pictured(self._parts, ports))
        self._reloader = Reloader(
            config, start.reader, stop, ports, self._parts, self._listeners, self._fleet
        )
        # Metrics of the process, shown in /metrics of every face.
        self._sources: list[Source] = [
            self._families,
            self._reloader.families,
            ports.sync.families,
            ports.served.families,
            self._doctor.families,
            stretch_families,
            busy_wait_families,
            self._fleet.families,
            self._keeper.families,
            self._shared.families,
        ]
        if start.identity is not None:
            self._sources.append(start.identity.families)
        if decisions is not None:
            self._sources.append(
                assembly.log_decisions(decisions, self._parts.selections, config).families
            )

    def _share(
        self, config: Config, accounts: assembly.Accounts, registrations: Registrations
    ) -> SharedState | NoSharedState:
        journal, deduplicator = accounts.shared_journal, accounts.deduplicator
        if config.state_server is None or journal is None or deduplicator is None:
            return NoSharedState()
        # Takes 18 MB of memory, so only a process that shares state loads it.
        from kvd.shared_state.catalog import Catalog
        from kvd.shared_state.service import SharedState

        return SharedState(
            config.state_server,
            journal,
            accounts.ledgers,
            deduplicator,
            self._parts.slots,
            self._parts.selections,
            self._ports.served,
            Catalog(registrations, self._targets_of_clients()),
            self._keeper.shared_until,
        )

    @property
    def _config(self) -> Config:
        return self._reloader.config

    def run_in(self, background: trio.Nursery, reloads: Signals) -> None:
        """Starts the tasks that run as long as the daemon."""
        background.start_soon(self._reloader.watch, reloads)
        if self._ports.control is not None:
            background.start_soon(control.answer, self._ports.control, self._reloader.reload)
        background.start_soon(self._sweep)
        background.start_soon(self._expire)
        background.start_soon(self._heaps.run)
        background.start_soon(self._picture.run)
        background.start_soon(sdnotify.feed_watchdog, lambda: not self._recovered.is_set())

    async def serve(self, listening: trio.Nursery, background: trio.Nursery) -> None:
        """Registers the workers of the settings and the fleet file, and serves until a signal."""
        config = self._config
        await self._register(config)
        with self._stop.interruptible():
            await self._fleet.read()
        listening.start_soon(self._fleet.run)
        with self._stop.interruptible():
            await self._keeper.prepare(self._targets_of_clients())
            listening.start_soon(self._keeper.run)
        await self._shared.prepare()
        background.start_soon(self._shared.run)
        indexing = [config.indexer_bind, config.selection_bind, config.conductor_bind]
        if config.gateway_bind is not None:
            listening.start_soon(self._parts.gateway.run)
            if config.gateway_kvd is None:
                indexing.append(config.gateway_bind)
        if any(bind is not None for bind in indexing):
            listening.start_soon(self._start_up)
        else:
            self._recovered.set()
        if not self._stop.is_requested:
            await self._serve_faces()

    def _targets_of_clients(self) -> dict[str, RegistrationTarget]:
        """Returns the targets that restore registrations which clients have made by calls."""
        if "upstream" not in self._targets:
            return self._targets
        return self._targets | {"upstream": UpstreamTarget(self._parts.gateway.upstreams, CALLS)}

    async def finish(self) -> None:
        """Publishes and saves the last state, once nothing changes any more."""
        await self._shared.finish()
        await self._keeper.finish()

    async def _register(self, config: Config) -> None:
        serves = self._ports.served.serves
        if config.indexer_bind is not None:
            for worker in config.workers:
                if serves(worker.key.partition):
                    self._parts.registry.register(
                        worker.key, worker.endpoint, worker.block_size, worker.replay_endpoint
                    )
        if config.selection_bind is not None:
            for record in config.catalog:
                if serves(record.key):
                    await self._parts.selections.workers.put(record)

    async def _sweep(self) -> None:
        """Frees the memory of ranks that have gone, and writes lines of the log that wait.

        Each round sets the time with which the chronicle records what happens until the next one.
        """
        state = self._parts.state
        while True:
            is_behind = logs.flush()
            if state.chronicle is not None:
                state.chronicle.set_time(trio.current_time())
            with UNREGISTRATION:
                is_more = state.sweep(SWEEP_STEPS)
            if is_more:
                await trio.lowlevel.checkpoint()
            else:
                await trio.sleep(LINES_PAUSE_S if is_behind else SWEEP_PAUSE_S)

    async def _expire(self) -> None:
        """Checks every second for old requests, unused publishers, a full index, and the like."""
        parts = self._parts
        index_full = IndexFullLog(parts.state.budget)
        unmatched = UnmatchedLog(parts.state)
        while True:
            await trio.sleep(EXPIRY_PAUSE_S)
            now = trio.current_time()
            index_full.check(now)
            self._doctor.note_counters(now)
            for work in (
                unmatched.check(),
                parts.slots.expire(now),
                parts.publishers.check_unused(),
                parts.selections.run_due(now),
            ):
                for _ in work:
                    await trio.lowlevel.checkpoint()
            while await parts.selections.workers.reconsider():
                pass

    async def _start_up(self) -> None:
        """Fills the index, and then opens the gate once enough workers are registered."""
        config, registry = self._config, self._parts.registry
        await self._serving.wait()
        filler = IndexFiller(
            config, self._parts, self._keeper, self._shared, self._listeners, self._ports.dialer
        )
        await filler.fill()
        self._recovered.set()
        if registry.instances() < config.min_initial_workers:
            log.info("waiting_for_workers", minimum=config.min_initial_workers)
        await registry.wait_for_instances(config.min_initial_workers)
        self._gate.set()
        log.info("ready", workers=registry.instances())
        await confirm_restored(self._parts.state, registry, self._parts.publishers)

    async def _serve_faces(self) -> None:
        """Serves the faces until a signal, then until all requests under way are answered."""
        with self._stop.interruptible(), trio.move_on_after(MEET_S):
            await self._parts.gateway.met()
        stop = trio.Event()
        async with trio.open_nursery() as serving:
            apis = self._ports.apis.routes(
                self._parts, lambda: self._config, self._shared.shown, self._sources
            )
            diagnose = diagnose_route(self._doctor, self._diagnoses)
            explainer = Explainer(self._parts.state, self._parts.selections)
            explain = explain_routes(explainer, self._explanations)
            of_all = (diagnose, *explain, *ui_routes(self._picture, self._parts.state))
            for face, routes, not_found in apis:
                face.log_requests(self._config.access_log)
                await serving.start(face.serve, (*routes, *of_all), not_found, stop)
                bind = " ".join(face.addresses())
                log.info("serving", version=VERSION, face=face.name, bind=bind)
            self._serving.set()
            serving.start_soon(self._announce)
            # All objects made so far stay: the garbage collector need never visit them again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            trio.lowlevel.add_instrument(FrequentCollector())
            with stretches_counted():  # stretches before this delayed no client
                await self._stop.wait()
            self._parts.selections.scheduler.stop()
            self._recovered.set()  # nobody waits for it any more
            stop.set()

    async def _announce(self) -> None:
        """Notifies systemd that the faces serve, once recovery is over."""
        await self._recovered.wait()
        if not self._stop.is_requested:
            await self._reloader.announce()

    def _families(self) -> Iterator[Family]:
        space, outgoing = self._ports.space, self._ports.outgoing
        help = "Number of unapplied messages of engines and replicas"
        yield gauge("kvd_queued_messages", help, space.messages)
        help = "Total size of the unapplied messages of engines and replicas in bytes"
        yield gauge("kvd_queued_bytes", help, space.size_bytes)
        yield from self._heaps.metrics()
        help = "Number of diagnoses refused at the limit"
        yield counter("kvd_diagnoses_refused_total", help, self._diagnoses.refused)
        help = "Number of explanations refused at the limit"
        yield counter("kvd_explanations_refused_total", help, self._explanations.refused)
        help = "Number of log lines dropped because the reader of stderr was too slow"
        yield counter("kvd_log_lines_dropped_total", help, logs.dropped())
        help = "Number of outgoing addresses refused, by stage"
        stages = {"named": outgoing.refused_names, "connecting": outgoing.refused_connections}
        yield by_label("kvd_outgoing_refused_total", "counter", help, "at", stages)
