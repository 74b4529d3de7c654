"""Takes part in replica sync: sends events of requests to other replicas, and applies theirs.

    open     opens the port for allowed subscribers; a port in use ends the start with one line
    start    slots and selections publish; listens to each registered replica

Both faces that account for requests share one port, so a replica's event is applied once, if
possible on the face through which the request came there (`kvd.replica_sync.replicas`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import trio

from kvd.config.errors import AddressError, StartError
from kvd.config.load import Config
from kvd.http.auth import is_loopback
from kvd.http.listeners import split_host_port
from kvd.model import PartitionKey
from kvd.net.curve import KeyPair, ZapAuthenticator
from kvd.net.dialing import Dialer
from kvd.net.link import LinkResources
from kvd.net.publisher import PubSocket, open_publisher
from kvd.net.replication import Replication
from kvd.net.zmq_link import NO_CURVE
from kvd.replica_sync.deduplication import Deduplicator
from kvd.replica_sync.replicas import Apply, Replicas, apply_once
from kvd.selection.reservations import Reservations
from kvd.selection.service import Selections
from kvd.slots.trackers import SlotTrackers
from kvd.telemetry.metrics import Family, counter
from kvd.wire.egress import EgressPolicy
from kvd.wire.lifecycle import Face, Lifecycle, Outcome
from kvd.wire.replica import ReplicaStats

if TYPE_CHECKING:
    from kvd.net.zsocket import Context
    from kvd_core.zmq.drain import InboxSpace


class ReplicaSync:
    """This process's part in replica sync; none without a port or a face that accounts."""

    def __init__(
        self,
        config: Config,
        outgoing: EgressPolicy,
        dialer: Dialer,
        keys: KeyPair | None,
        space: InboxSpace,
    ) -> None:
        self._config = config
        self._outgoing = outgoing
        self._dialer = dialer
        self._keys = keys
        self._space = space
        self._stats = ReplicaStats()
        self._publisher: PubSocket | None = None
        self._authenticator: ZapAuthenticator | None = None

    async def open(self, context: Context) -> None:
        """Opens the port; raises StartError."""
        config = self._config
        sync = config.replica_sync
        if sync is None or (config.slot_tracker_bind is None and config.selection_bind is None):
            return
        curve = NO_CURVE
        if self._keys is not None and config.curve.replicas is not None:
            curve = self._keys.server()
            self._authenticator = ZapAuthenticator(context, config.curve.replicas)
        try:
            self._publisher = await open_publisher(
                context, sync.host, sync.port, config.replica_link, curve
            )
        except OSError as error:
            raise AddressError(str(error.strerror)) from None
        self._check_open(self._publisher)

    def _check_open(self, publisher: PubSocket) -> None:
        """Raises StartError if strangers could subscribe, unless the settings allow that."""
        if self._config.allow_unauthenticated or self._authenticator is not None:
            return
        for endpoint in publisher.endpoints:
            host, _ = split_host_port(endpoint.removeprefix("tcp://"))
            if not is_loopback(host):
                raise StartError(
                    f"any client could subscribe to the requests at {endpoint}: replica sync "
                    "beyond this machine needs --replica-sync-client-keys or "
                    "--allow-unauthenticated"
                )

    def start(
        self,
        nursery: trio.Nursery,
        context: Context,
        slots: SlotTrackers,
        selections: Selections,
        deduplicator: Deduplicator | None = None,
    ) -> Replicas:
        """Returns the replicas, with those of the settings registered; none without a port.

        If state is also shared through a server, `deduplicator` keeps events of replicas from being
        sent there again.
        """
        sync = self._config.replica_sync
        if sync is None or self._publisher is None:
            return Replicas(None, self._stats, self._outgoing)
        if self._authenticator is not None:
            nursery.start_soon(self._authenticator.run)
        affinity = selections.affinity
        links = Replication(
            nursery,
            LinkResources(context, self._dialer, self._space),
            self._publisher,
            _apply(slots, selections.reservations, deduplicator),
            self._stats,
            selections.writer_id,
            self._config.replica_link,
            bind=None if affinity is None else affinity.apply,
        )
        slots.steps.subscribe(links.publish)
        selections.reservations.steps.subscribe(links.publish)
        if affinity is not None:
            affinity.bindings.subscribe(links.publish_binding)
        replicas = Replicas(links, self._stats, self._outgoing)
        for endpoint in sync.peers:
            replicas.register(endpoint)
        return replicas

    def apply_config(self, config: Config) -> None:
        """Replaces the keys that clients need to subscribe from now on."""
        if self._authenticator is not None and config.curve.replicas is not None:
            self._authenticator.keys = config.curve.replicas

    def families(self) -> Iterator[Family]:
        if self._authenticator is not None:
            help = "Number of clients refused as subscribers of the request events for replicas"
            yield counter("kvd_replica_keys_refused_total", help, self._authenticator.refused)


def _apply(
    slots: SlotTrackers, reservations: Reservations, deduplicator: Deduplicator | None
) -> Callable[[Lifecycle], Outcome]:
    """Returns the function that applies an event of a replica to the face that it is for."""
    eases = deduplicator is None  # a deduplicator wakes waiting selections itself
    faces: dict[Face, Apply] = {
        Face.SLOT_TRACKER: partial(slots.apply, eases=eases),
        Face.SELECTION: partial(reservations.apply, eases=eases),
    }

    def take(event: Lifecycle) -> Outcome:
        return apply_once(event, trio.current_time(), faces)

    def ease(key: PartitionKey) -> None:
        slots.ease(key)
        reservations.ease(key)

    return take if deduplicator is None else partial(deduplicator.apply, apply=take, ease=ease)
