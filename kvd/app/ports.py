"""Opens all sockets before anything runs, so that an address in use is reported in one line.

faces           addresses with and without TLS, some of them the service manager's
replica sync    the port that replicas subscribe to
kvd reload      the control socket, to which the command connects
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvd.app import control
from kvd.app.apis import Apis
from kvd.config.errors import StartError
from kvd.config.load import Config
from kvd.http.listeners import file_remover
from kvd.index.served_models import ServedModels
from kvd.net.curve import KeyPair
from kvd.net.dialing import Dialer
from kvd.platform.activation import PassedSockets
from kvd.replica_sync.plane import ReplicaSync
from kvd.telemetry.logs import get_logger
from kvd.wire.egress import EgressPolicy
from kvd_core.zmq.drain import InboxSpace

if TYPE_CHECKING:
    from kvd.net.zsocket import Context

log = get_logger(__name__)


class Ports:
    """The process's ways to the outside: what it listens on, and the rules by which it dials."""

    def __init__(self, config: Config) -> None:
        self.outgoing = EgressPolicy(config.outgoing_allow)
        self.keys = None if config.curve.secret is None else KeyPair(config.curve.secret)
        self.dialer = Dialer(
            self.outgoing, config.outgoing_lookup_s, config.outgoing_lookup_every_s, keys=self.keys
        )
        self.space = InboxSpace(config.queues_messages, config.queues_bytes)
        self.sync = ReplicaSync(config, self.outgoing, self.dialer, self.keys, self.space)
        self.served = ServedModels(config.serve, config.owners)
        self.apis = Apis(config, self.served)
        self.control: socket.socket | None = None  # None: no service manager names a folder for it

    async def open(
        self,
        opened: ExitStack,
        config: Config,
        environ: Mapping[str, str],
        passed: PassedSockets,
        context: Context,
    ) -> None:
        """Opens all sockets; closing `opened` closes them. Raises StartError."""
        for face, binds in self.apis.binds.items():
            await face.open(opened, config, binds, passed)
        if passed.left():  # their clients would wait for ever
            raise StartError(
                "the service manager passes sockets that belong to no face: "
                f"{', '.join(passed.left())}; give each the address or the name of a face"
            )
        if (path := control.path(environ)) is not None:
            self.control = opened.enter_context(await control.listen(path))
            opened.callback(file_remover(self.control))
        if self.keys is not None:
            log.info("curve_key", public_key=self.keys.public.decode())
        await self.sync.open(context)
