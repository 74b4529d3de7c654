"""Several gateway processes on one port, the kvd that chooses for them, and their supervisor.

    parent ── forks ──> kvd         the index and all other faces; chooses, over a Unix socket
       │      forks ──> gateway-0   a listening socket of the shared port, and one of its own
       │      forks ──> gateway-1   ...
       ├ starts a process again that ends: at once if it lived for a while, else after a pause
       └ SIGTERM: the gateways drain, then kvd ends

The parent opens the shared port before it forks, so that an address in use is reported in one line.
It keeps the sockets, so that connections which a killed process had not accepted yet wait for the
next one. It runs no event loop and no thread, and so may fork at any time. Each process sends its
notices for the service manager to the parent, which notifies the service manager itself.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial

from kvd.app import control, daemon
from kvd.app.control import FOLDER_VARIABLE
from kvd.app.reloading import is_reloadable
from kvd.app.stopping import EXIT_SECOND_SIGNAL
from kvd.config.binds import Binds, UnixBind
from kvd.config.errors import AddressError, StartError
from kvd.config.load import Config
from kvd.config.reload import ConfigReader
from kvd.config.sources import FACE_BINDS
from kvd.gateway.siblings import KVD, ProcessIdentity
from kvd.http.auth import Token
from kvd.http.listeners import file_remover, open_shared
from kvd.http.options import UnixRights
from kvd.http.routes import Scope
from kvd.platform import activation, sdnotify
from kvd.platform.activation import PassedSockets
from kvd.platform.signals import Signals, end_with_parent
from kvd.telemetry.logs import get_logger
from kvd.wire.urls import UNIX_PREFIX

# Pause before a process that has ended soon after its start is started again; each further pause is
# twice as long. Connections that come to the process meanwhile wait.
FIRST_PAUSE_S = 0.1
MAX_PAUSE_S = 2.0
WELL_S = 10.0  # a process that has run for so long is started again at once when it ends

OWN_RIGHTS = UnixRights(0o600)  # of the sockets between the processes
MESSAGE_BYTES = 4096  # longest notice of a process to its service manager

log = get_logger(__name__)

Named = tuple[str, socket.socket]  # a socket, and the face that listens there


@dataclass(eq=False, slots=True)
class Child:
    """One child process, running or due to be started."""

    name: str
    config: Config  # of the whole service, as of the last reload that the process has applied
    configured: Callable[[Config], Config]  # makes the settings of the process of that
    listening: list[Named]
    notices: socket.socket  # receives the notices that it sends to its service manager
    due_at: float | None = 0.0  # when to start it; None: it runs already, or must not run
    pid: int | None = None
    restarts: int = 0
    started_at: float = 0.0
    heard_at: float = 0.0
    pause_s: float = 0.0
    is_ready: bool = False
    is_aborted: bool = False  # it hung and was sent SIGABRT
    is_reload_due: bool = False  # SIGHUP has come, and it has not applied a reload since

    def signal(self, number: signal.Signals) -> None:
        """Signals the process, if there is one."""
        if self.pid is not None:  # no other process has this number before `waitpid`
            os.kill(self.pid, number)


def run(config: Config, reader: ConfigReader) -> int:
    """Does what `daemon.run` does, in several processes if the settings say so."""
    if config.gateway_bind is None or config.gateway_processes == 1:
        return daemon.run(config, reader)
    parent = os.getpid()
    try:
        passed = activation.receive(os.environ)
    except ValueError as error:
        raise StartError(str(error)) from None
    with _opening("make a folder for the sockets between the processes"):
        folder = tempfile.mkdtemp(prefix="kvd-", dir=control.folder(os.environ))
    opened = ExitStack()
    try:
        opened.enter_context(closing(passed))
        with _opening("open the sockets between the processes"):
            supervisor = _Supervisor(config, reader, folder, passed, opened)
        return supervisor.run(reloads=is_reloadable(config, reader))
    finally:
        if os.getpid() == parent:  # a child returns through here as well
            opened.close()
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _opening(what: str) -> Iterator[None]:
    """Turns an OSError into one line: the folder may be read-only, or its name too long."""
    try:
        yield
    except OSError as error:
        why = ": ".join(filter(None, (error.filename, error.strerror or str(error))))
        remedy = f"{FOLDER_VARIABLE}, else TMPDIR, names the folder"
        raise AddressError(f"cannot {what}: {why}; {remedy}") from None


class _Supervisor:
    """The parent: opens the sockets, starts the processes and watches them."""

    def __init__(
        self,
        config: Config,
        reader: ConfigReader,
        folder: str,
        passed: PassedSockets,
        opened: ExitStack,
    ) -> None:
        """Opens the shared port; raises StartError."""
        assert config.gateway_bind is not None
        token = Token("processes", Scope.ANY, os.urandom(32).hex().encode())
        reader = replace(reader, own_tokens=(token,))
        config = reader.completed(config)
        self._reader, self._token, self._opened = reader, token, opened
        self._folder = folder
        self._pid = os.getpid()
        shared = self._open_shared(config, passed)
        gateways = [f"gateway-{number}" for number in range(config.gateway_processes)]
        others = any(getattr(config, name) for name in FACE_BINDS if name != "gateway_bind")
        names = [KVD, *gateways] if config.gateway_kvd is None or others else gateways
        self._paths = {name: f"{folder}/{name}.sock" for name in names}
        self._children: list[Child] = []
        if KVD in names:
            path = self._paths[KVD]
            own = self._open_own(path)
            configured = partial(_of_kvd, path=path)
            self._add(KVD, config, configured, [("processes", own), *passed.take_all()])
        kvd, kvd_token = config.gateway_kvd, config.gateway_kvd_token
        if kvd is None:
            kvd, kvd_token = (f"{UNIX_PREFIX}{self._paths[KVD]}",), token.secret
        for name, sockets in zip(gateways, shared, strict=True):
            path = self._paths[name]
            own = self._open_own(path)
            configured = partial(_of_gateway, path=path, chosen_by=kvd, token=kvd_token)
            self._add(name, config, configured, [("gateway", own), *sockets])
        self._announced = False
        self._stopping = False
        self._code = 0
        self._watchdog_s = sdnotify.watchdog_s()

    def _open_shared(self, config: Config, passed: PassedSockets) -> list[list[Named]]:
        """Returns the sockets of the gateway's port, a list for each process that shares it."""
        count = config.gateway_processes
        found: list[list[Named]] = [[] for _ in range(count)]
        assert config.gateway_bind is not None
        for name, is_tls in (("gateway", False), ("gateway-tls", True)):
            binds = [bind for bind in config.gateway_bind.each if bind.tls == is_tls]
            taken = passed.named(name) if binds else []
            shares = [[taken] * count] if taken else []
            for bind in [] if taken else binds:
                at = passed.bound_to(bind.address)
                shares.append(
                    [at] * count if at else self._open(bind.address, config.unix_rights, count)
                )
            for each in shares:
                for mine, sockets in zip(found, each, strict=True):
                    mine += [(name, sock) for sock in sockets]
        for sock in {sock for each in found for _, sock in each}:
            self._opened.enter_context(sock)
        return found

    def _open(self, bind: str, rights: UnixRights, count: int) -> list[list[socket.socket]]:
        try:
            found = open_shared(bind, count, rights)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AddressError(str(why)) from None
        if bind.startswith(UNIX_PREFIX):
            self._opened.callback(file_remover(found[0][0]))
        return found

    def _open_own(self, path: str) -> socket.socket:
        [[sock]] = open_shared(f"{UNIX_PREFIX}{path}", 1, OWN_RIGHTS)
        return self._opened.enter_context(sock)

    def _add(
        self,
        name: str,
        config: Config,
        configured: Callable[[Config], Config],
        sockets: list[Named],
    ) -> None:
        notices = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        notices.bind(self._notices_path(name))
        self._opened.enter_context(notices)
        self._children.append(Child(name, config, configured, sockets, notices))

    def _notices_path(self, name: str) -> str:
        return f"{self._folder}/{name}.notices"

    def run(self, *, reloads: bool) -> int:
        """Runs until a signal ends it; returns the exit code: in a child that of its daemon."""
        numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, *[signal.SIGHUP] * reloads]
        with closing(Signals(*numbers)) as signals:
            while True:
                for child in self._children:
                    if child.due_at is None or child.due_at > time.monotonic():
                        continue
                    # The child keeps these signals blocked: one that comes before it can read it
                    # waits, instead of ending it.
                    try:
                        pid = os.fork()
                    except OSError as error:
                        self._note_unstarted(child, error)
                        continue
                    if pid == 0:
                        return self._become(child)
                    self._note_started(child, pid)
                if not self._is_running():
                    return self._code
                self._wait(signals)

    def _is_running(self) -> bool:
        return not self._stopping or any(child.pid is not None for child in self._children)

    # ---- in a child

    def _become(self, child: Child) -> int:
        end_with_parent(self._pid, f"kvd {child.name}")
        mine = {sock for _, sock in child.listening}
        for other in self._children:
            other.notices.close()
            for _, sock in other.listening:
                if sock not in mine:
                    sock.close()
        os.environ.pop(FOLDER_VARIABLE, None)  # `kvd reload` would reach only one of the processes
        os.environ["NOTIFY_SOCKET"] = self._notices_path(child.name)
        identity = ProcessIdentity(child.name, self._paths, child.restarts, self._token.secret)
        config = child.configured(child.config)
        return daemon.run(config, self._reader, PassedSockets(child.listening), identity)

    # ---- in the parent

    def _note_started(self, child: Child, pid: int) -> None:
        child.pid, child.due_at = pid, None
        child.is_ready = child.is_aborted = False
        child.started_at = child.heard_at = time.monotonic()
        log.info("process_started", process=child.name, pid=pid, restarts=child.restarts)
        if child.is_reload_due:  # it had ended before, or has refused and will again
            child.signal(signal.SIGHUP)
        if child.name == KVD and not child.restarts:
            # While no kvd runs, gateways must be refused rather than wait. So the parent gives up
            # its copy of the socket, and the next kvd opens one itself.
            child.listening.pop(0)[1].close()

    def _note_unstarted(self, child: Child, error: OSError) -> None:
        """Tries again, as memory may be short for a while; gives up at the first start."""
        if self._announced:
            self._plan(child, is_well=False)
        else:
            self._code = 1
            self._stop()
        reason = error.strerror or error
        log.error("process_not_started", process=child.name, reason=reason, pause_s=child.pause_s)

    def _wait(self, signals: Signals) -> None:
        """Waits for something to do, and does it, except for starting processes."""
        now = time.monotonic()
        dues = [child.due_at - now for child in self._children if child.due_at is not None]
        if self._watchdog_s is not None:
            dues.append(self._watchdog_s / 2)
        waiting = select.poll()
        waiting.register(signals.fileno(), select.POLLIN)
        for child in self._children:
            waiting.register(child.notices.fileno(), select.POLLIN)
        waiting.poll(1000 * max(0.0, min(dues)) if dues else None)
        for child in self._children:
            self._hear(child)
        while (number := signals.read()) is not None:
            self._take(number)
        if self._watchdog_s is not None:
            self._watch(self._watchdog_s)

    def _take(self, number: signal.Signals) -> None:
        if number is signal.SIGCHLD:
            for child in self._children:
                self._reap(child)
        elif number is signal.SIGHUP:
            for child in self._children:
                child.is_reload_due = True
                child.signal(number)
        elif self._stopping:  # an operator who asks twice does not want to wait
            for child in self._children:
                child.signal(signal.SIGKILL)
            raise SystemExit(EXIT_SECOND_SIGNAL)
        else:
            log.info("stopping", signal=number.name)
            self._stop()

    def _reap(self, child: Child) -> None:
        """Takes note of a process if it has ended."""
        if child.pid is None:
            return
        ended, status = os.waitpid(child.pid, os.WNOHANG)
        if not ended:
            return
        child.pid, code = None, os.waitstatus_to_exitcode(status)
        if self._stopping:
            self._stop_kvd()
            return
        if not self._announced and not child.is_ready:  # it cannot start
            if code < 0:  # a signal ended it, as when memory is short; else it has logged why
                log.error("process_ended", process=child.name, code=code)
            self._code = code if code > 0 else 1
            self._stop()
            return
        self._plan(child, is_well=time.monotonic() - child.started_at >= WELL_S)
        child.restarts += 1
        log.warning("process_ended", process=child.name, code=code, pause_s=child.pause_s)

    def _plan(self, child: Child, *, is_well: bool) -> None:
        """Has a process started again."""
        child.pause_s = 0.0 if is_well else min(2 * child.pause_s, MAX_PAUSE_S) or FIRST_PAUSE_S
        child.due_at = time.monotonic() + child.pause_s

    def _stop(self) -> None:
        """Makes the gateways drain; kvd is ended after them."""
        self._stopping = True
        sdnotify.notify(sdnotify.STOPPING)
        for child in self._children:
            child.due_at = None
            for _, sock in child.listening:  # no client must wait for an answer there
                sock.close()
            if child.name != KVD:
                child.signal(signal.SIGTERM)
        self._stop_kvd()

    def _stop_kvd(self) -> None:
        if all(child.pid is None for child in self._children if child.name != KVD):
            for child in self._children:
                child.signal(signal.SIGTERM)

    def _hear(self, child: Child) -> None:
        """Takes all notices of a process to its service manager."""
        with suppress(BlockingIOError):
            while True:
                self._heed(child, child.notices.recv(MESSAGE_BYTES))

    def _heed(self, child: Child, notice: bytes) -> None:
        child.heard_at = time.monotonic()
        if sdnotify.RELOADED in notice:
            child.is_reload_due = False
            with suppress(StartError):  # the files have changed since: the next reload has them
                child.config = self._reader.again(child.config).config
        if not self._announced and sdnotify.EXTENSION in notice:
            sdnotify.notify(notice)  # the start takes long, and is still under way
        if sdnotify.READY in notice:
            child.is_ready = True
        if not self._announced and all(each.is_ready for each in self._children):
            self._announced = True
            sdnotify.notify(sdnotify.READY)
            log.info("processes_ready", count=len(self._children))

    def _watch(self, limit_s: float) -> None:
        """Aborts processes whose loop hangs, so that they write their stack; kills them next."""
        sdnotify.notify(sdnotify.WATCHDOG)
        now = time.monotonic()
        for child in self._children:
            if child.pid is not None and now - child.heard_at > limit_s:
                log.error("process_hangs", process=child.name, seconds=limit_s)
                child.signal(signal.SIGKILL if child.is_aborted else signal.SIGABRT)
                child.heard_at, child.is_aborted = now, True


def _of_kvd(config: Config, path: str) -> Config:
    """Returns the configuration of the process that chooses and has all faces but the gateway."""
    binds = (*(config.selection_bind.each if config.selection_bind else ()), UnixBind(path))
    return replace(
        config, gateway_bind=None, upstreams=None, gateway_kvd=None, selection_bind=Binds(binds)
    )


def _of_gateway(config: Config, path: str, chosen_by: tuple[str, ...], token: bytes) -> Config:
    """Returns the configuration of a process that has the gateway alone."""
    assert config.gateway_bind is not None
    binds = Binds((*config.gateway_bind.each, UnixBind(path)))
    return replace(
        config,
        indexer_bind=None,
        slot_tracker_bind=None,
        selection_bind=None,
        conductor_bind=None,
        gateway_bind=binds,
        gateway_kvd=chosen_by,
        gateway_kvd_token=token,
        peers=(),
        replica_sync=None,
        decision_log=None,
        state_dir=None,
    )
