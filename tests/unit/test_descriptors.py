"""The process's descriptors are divided among listeners, connections and waiting selections."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.platform.descriptors import (
    ENOUGH,
    LISTENER_DESCRIPTORS,
    MAX_LISTENERS,
    MAX_WAITING,
    ROOM,
    listeners_within,
    make_room,
    raise_limit,
    waiting_within,
)


@pytest.mark.parametrize(
    ("limit", "listeners", "waiting"),
    [
        (64, 6, 6),
        (1024, 102, 102),
        (65_536, 12_390, 12_390),
        (ENOUGH, MAX_LISTENERS, MAX_WAITING),
        (10**9, MAX_LISTENERS, MAX_WAITING),
    ],
)
def test_descriptors_are_shared_out(limit: int, listeners: int, waiting: int) -> None:
    assert listeners_within(limit) == listeners
    assert waiting_within(limit) == waiting
    assert listeners * LISTENER_DESCRIPTORS + waiting <= limit


def test_the_kernels_table_has_room_from_the_start() -> None:
    limit = raise_limit()
    make_room(limit)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    assert int(status["FDSize"]) >= min(limit, ROOM)
