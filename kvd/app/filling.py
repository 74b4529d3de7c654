"""Fills the index at the start: from a fresh snapshot, else a peer, else an older snapshot.

state directory ── a snapshot, not too old, with blocks? ── yes ─────────────> index
                      │ no                                                       ^
peers of the settings, replicas that share our state ── the dump of one of them ─┤
                      │ none has anything                                        │
state directory ── a snapshot, however old ──────────────────────────────────────┘
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import trio

from kvd.app.apis import Components
from kvd.config.load import Config
from kvd.net.dialing import Dialer
from kvd.net.listeners import ListenerTasks
from kvd.net.recovery import recover
from kvd.persistence.none import NoKeeper
from kvd.persistence.store import Keeper
from kvd.selection.readiness import Recovery
from kvd.shared_state.none import NoSharedState
from kvd.telemetry.logs import get_logger
from kvd.telemetry.stretches import RECOVERY

if TYPE_CHECKING:
    from kvd.shared_state.service import SharedState

# Longest wait for the replicas that share our state, before the index is filled without them.
JOIN_S = 5.0

# Time after which a connected engine has heard of its new subscriber, and a peer has applied what
# the engine published before.
SUBSCRIBED_S = 0.1

log = get_logger(__name__)


class IndexFiller:
    """The sources of an empty index."""

    def __init__(
        self,
        config: Config,
        parts: Components,
        keeper: Keeper | NoKeeper,
        shared: SharedState | NoSharedState,
        listeners: ListenerTasks,
        dialer: Dialer,
    ) -> None:
        self._config = config
        self._parts = parts
        self._keeper = keeper
        self._shared = shared
        self._listeners = listeners
        self._dialer = dialer

    async def fill(self) -> None:
        """Fills the index from the first source that has something; it stays empty without one."""
        if await self._keeper.has_fresh_index() and await self._restore(unless_empty=True):
            return
        peers = await self._peers()
        if peers and await self._recover(peers):
            self._keeper.leave_index()
        else:
            await self._restore()

    async def _restore(self, *, unless_empty: bool = False) -> bool:
        """Fills the index from the state directory; returns False if that has nothing of use.

        A process that ended before its engines came has left a snapshot without blocks.
        """
        blocks = await RECOVERY.steps_of(self._keeper.restore_index(unless_empty=unless_empty))
        if blocks is None:
            return False
        self._parts.selections.readiness.note_recovery(Recovery.DONE, blocks)
        gc.freeze()
        return True

    async def _peers(self) -> list[str]:
        """Returns the peers to recover from: configured ones, then those that share our state."""
        shared = await self._shared.addresses(JOIN_S)
        return list(dict.fromkeys((*self._parts.peers, *shared)))

    async def _recover(self, peers: list[str]) -> bool:
        """Fills the index from a peer; returns False if none has anything.

        No event may fall between a dump and our subscriptions. So peers are asked once all engines
        have heard of us, or when the delay is over.
        """
        config, parts = self._config, self._parts
        await self._listeners.entered()
        latest = trio.current_time() + config.recovery_delay_s
        with trio.move_on_at(latest):
            await parts.registry.wait_for_instances(config.min_initial_workers)
            await parts.gateway.upstreams.all_met()
            await self._listeners.connected()
            await trio.sleep(SUBSCRIBED_S)
        recovering = recover(
            parts.state,
            peers,
            parts.recovery,
            config.recovery,
            token=config.peers_token,
            dialer=self._dialer,
            again_at=latest,
        )
        peer = await RECOVERY.steps_of(recovering)
        outcome = Recovery.EMPTY if peer is None else Recovery.DONE
        parts.selections.readiness.note_recovery(outcome, parts.recovery.blocks)
        if peer is None:
            log.warning("recovery_failed", peers=len(peers))
        gc.freeze()  # these objects stay: with 65,536 workers a full collection took 16 ms more
        return peer is not None
