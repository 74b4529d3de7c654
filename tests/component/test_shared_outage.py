"""A process whose shared-state server is away: its bookings are numbered as they come."""

from __future__ import annotations

import gc
from array import array

import pytest
import trio

from kvd.index.served_models import EVERYTHING
from kvd.model import PartitionKey
from kvd.persistence.journal import SharedUntil
from kvd.replica_sync.deduplication import Deduplicator
from kvd.selection.options import RouterOptions
from kvd.shared_state.catalog import Catalog
from kvd.shared_state.service import SharedState
from kvd.slots.shared_loads import Ledgers
from kvd.slots.trackers import SlotTrackers
from kvd.wire.state_address import StateServer, parse_address
from kvd_core.ledger.journal import Journal
from tests.support.ports import find_free_port
from tests.support.registrations import NoRegistrations
from tests.support.selecting import Service

KEY = PartitionKey("m", "default")


# After a refused connection the Redis client leaves its streams to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_steps_do_not_pile_up_while_the_server_is_away() -> None:
    journal = Journal(1 << 20)
    journal.pause()
    ledgers = Ledgers(journals=[journal])
    slots = SlotTrackers(1e9, ledgers, clock=trio.current_time)
    slots.register(KEY, 1, 4, 0, 1)
    selections = Service(RouterOptions(uses_kv_events=False), ledgers=ledgers).selections
    catalog = Catalog(NoRegistrations(), {})  # type: ignore[arg-type]
    address = parse_address(f"redis://127.0.0.1:{find_free_port()}")
    server = StateServer(address, "kvd", None, None, None, 10.0)
    deduplicator = Deduplicator(journal, trio.current_time)
    rooms = slots, selections, EVERYTHING, catalog
    shared = SharedState(server, journal, ledgers, deduplicator, *rooms, SharedUntil(None))
    await shared.prepare()
    ledger = slots.trackers[KEY].ledger
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shared.run)
        with trio.fail_after(10):
            for number in range(3):
                hashes = array("Q", [number]).tobytes()
                ledger.add(f"r{number}", 0, hashes, 4, trio.current_time())
                while len(journal):  # noqa: ASYNC110  no event signals it
                    await trio.sleep(0.01)
        assert not shared.shown()["connected"]
        nursery.cancel_scope.cancel()
    gc.collect()
