"""Reloads the files of a running daemon: applies all that they say now, or nothing of it.

prepare   reads and checks every file; may wait, changes nothing
commit    applies all of them in one step without a wait: no request sees half of it
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import trio

from kvd.app.api_server import read_files
from kvd.app.apis import Components
from kvd.app.control import ReloadResult
from kvd.app.ports import Ports
from kvd.app.stopping import Stop
from kvd.config import secret_files
from kvd.config.errors import StartError
from kvd.config.load import Config, Prepared
from kvd.config.reload import ConfigReader, Reloaded
from kvd.fleet_file.none import FleetFile
from kvd.http.certificates import TlsCredentials
from kvd.net.listeners import ListenerTasks
from kvd.platform import sdnotify
from kvd.platform.signals import Signals
from kvd.telemetry import logs
from kvd.telemetry.logs import get_logger
from kvd.telemetry.metrics import Family, by_label

log = get_logger(__name__)


def is_reloadable(config: Config, reader: ConfigReader) -> bool:
    """Returns whether there is any file to read again."""
    keys = config.curve.replicas is not None
    files = config.policy.tokens, config.fleet_file, keys, config.tls
    return reader.has_file or any(files)


def warn_of_secrets(config: Config) -> None:
    """Logs which files of secrets other users of the machine can read."""
    if paths := secret_files.exposed(config.values):
        log.warning("secrets_exposed", files=" ".join(map(str, paths)))


class Reloader:
    """Holds the configuration in force, and replaces it at a reload."""

    def __init__(
        self,
        config: Config,
        reader: ConfigReader,
        stop: Stop,
        ports: Ports,
        parts: Components,
        listeners: ListenerTasks,
        fleet: FleetFile,
    ) -> None:
        self.config = config
        self._reader = reader
        self._stop = stop
        self._ports = ports
        self._parts = parts
        self._listeners = listeners
        self._fleet = fleet
        self._announced = False  # the service manager knows that kvd has started
        self._one_at_a_time = trio.Lock()
        self._outcomes = {"applied": 0, "refused": 0}

    async def announce(self) -> None:
        """Notifies the service manager that kvd has started."""
        self._announced = True
        await sdnotify.notify_ready()

    async def watch(self, reloads: Signals) -> None:
        """Reloads at each signal; signals that come meanwhile cause one more reload."""
        while True:
            await reloads.wait()
            await self.reload()

    async def reload(self) -> ReloadResult:
        """Reloads, and notifies the service manager of the begin and the end."""
        async with self._one_at_a_time:
            if self._notifies_manager():
                sdnotify.notify_reloading()
            result = await self._take_over()
            await self._ports.dialer.recheck()
            if self._notifies_manager():
                await sdnotify.notify_ready()
            return result

    def _notifies_manager(self) -> bool:
        return self._announced and not self._stop.is_requested

    async def _take_over(self) -> ReloadResult:
        """Applies what all files say now, or nothing; logs and returns the outcome."""
        try:
            async with self._fleet.reloading():
                prepared, waiting = await self._prepare()
        except StartError as error:
            self._outcomes["refused"] += 1
            log.error("reload_refused", reason=error)
            return ReloadResult(refused=str(error))
        for each in prepared:
            each.commit()
        self._outcomes["applied"] += 1
        sdnotify.notify(sdnotify.RELOADED)
        changed = tuple(name for each in prepared for name in each.changed)
        log.info("reloaded", changed=" ".join(changed))
        warn_of_secrets(self.config)
        if waiting:
            log.warning("restart_needed", settings=" ".join(waiting))
        return ReloadResult(changed, waiting)

    async def _prepare(self) -> tuple[list[Prepared], tuple[str, ...]]:
        """Returns the changes to commit, and settings that need a restart; raises StartError."""
        # In a thread: thousands of workers take half a second, and a file may be on a slow share.
        reloaded, credentials = await trio.to_thread.run_sync(
            self._read_again, self.config, abandon_on_cancel=True
        )
        if self._stop.is_requested:
            raise StartError("kvd is stopping")
        config = reloaded.config
        for face in self._ports.apis.served:
            face.check_open(config)
        commit = partial(self._apply_config, config, credentials)
        fleet = await self._fleet.prepare(config.outgoing_allow)
        return [Prepared(reloaded.changed, commit), fleet], reloaded.waiting

    def _read_again(self, running: Config) -> tuple[Reloaded, TlsCredentials | None]:
        reloaded = self._reader.again(running)
        tls = reloaded.config.tls
        return reloaded, None if tls is None else read_files(tls)

    def _apply_config(self, config: Config, credentials: TlsCredentials | None) -> None:
        """Applies other values of live settings, and other certificates."""
        self.config = config
        logs.set_output(config.log_level, config.log_format)
        ports, parts = self._ports, self._parts
        ports.outgoing.allow(config.outgoing_allow)
        ports.dialer.lookup_s = config.outgoing_lookup_s
        ports.dialer.lookup_every_s = config.outgoing_lookup_every_s
        ports.sync.apply_config(config)
        for face in ports.apis.served:
            face.set_limits(config.http)
            face.set_policy(config)
            if credentials is not None:
                face.set_credentials(credentials)
            face.log_requests(config.access_log)
        self._listeners.set_replay_options(config.replays)
        parts.state.budget.max_blocks = config.index_max_blocks
        parts.state.max_partitions = parts.slots.max_trackers = config.max_partitions
        parts.slots.expiry_s = config.request_expiry_s
        parts.selections.reload(config.router, config.request_expiry_s)

    def families(self) -> Iterator[Family]:
        """Yields the number of reloads."""
        help = "Number of reloads of the configuration, by outcome"
        name = "kvd_config_reloads_total"
        yield by_label(name, "counter", help, "outcome", self._outcomes)
