"""Checks that registry, state and listener tasks agree whenever no call is under way."""

from __future__ import annotations

from kvd.index.partitions import State
from kvd.index.registry import Registry
from kvd.model import RankKey
from kvd.net.listeners import ListenerTasks
from kvd.wire.stream_link import ListenerStatus


def check_agreement(state: State, registry: Registry, tasks: ListenerTasks) -> None:
    """Fails unless all three agree. A listener may run, or wait for the start of its task."""
    registrations = list(registry.registrations())
    known = {
        RankKey(key, *rank)
        for key, partition in state.partitions.items()
        for rank in partition.rank_keys()
    }
    assert {registration.key for registration in registrations} == known
    listening = {
        registration.key
        for registration in registrations
        if registration.listener.status is not ListenerStatus.PAUSED
    }
    assert tasks._tasks.keys() | tasks._waiting.keys() == listening
    for partition in state.partitions.values():
        assert partition.workers, "a partition that nobody is in"
        for instance_id, dp_rank in partition.rank_keys():
            assert dp_rank in partition.workers[instance_id].ranks()
        partition.index.verify()
    for key, instance_id in state.unconfirmed:
        assert instance_id in state.partitions[key].workers
