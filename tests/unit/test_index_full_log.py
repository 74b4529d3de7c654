"""The log reports a full index once when it begins and once when it is over."""

from __future__ import annotations

from kvd.app.index_full_log import QUIET_S, IndexFullLog
from kvd_core.index.prefix_index import Budget, IngestStats, PrefixIndex
from tests.support.loglines import logged


def test_a_full_index_is_said_once_until_there_was_room_for_a_while() -> None:
    budget = Budget(1)
    worker = PrefixIndex(1, IngestStats(), budget=budget).add_worker(1)
    log = IndexFullLog(budget)

    def store(name: int) -> None:
        worker.store(0, [name], [name])

    with logged() as lines:
        log.check(0.0)
        store(1)
        log.check(1.0)
        assert lines() == ""
        for second in range(2, 10):
            store(2)
            log.check(second)
        assert lines().count("\n") == 1
        assert "event=index_full max_blocks=1 blocks=1 pairs=1" in lines()
        log.check(9.0 + QUIET_S - 0.1)
        assert lines().count("\n") == 1
        log.check(9.0 + QUIET_S)
        assert lines().endswith("event=index_has_room refused_blocks=8\n")
        store(2)
        log.check(500.0)
        assert lines().count("event=index_full") == 2
