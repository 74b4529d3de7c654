"""Receives a listener's batches in tests (`kvd.wire.applied_batches.BatchSink`)."""

from __future__ import annotations

from kvd_core.index.prefix_index import ALL_TIERS, CLEARED, FLAWED, NEW_RANK

SHOWS = {b"emptied": CLEARED, b"flawed": FLAWED, b"both": CLEARED | FLAWED}


class NoStream:
    """Discards batches; the base class of streams that keep them."""

    def apply(self, payload: bytes) -> int:
        return 0

    def clear(self) -> None:
        pass

    def restored(self) -> bool:
        return False

    def names_restored(self, payload: bytes) -> bool:
        return False

    @property
    def ignored(self) -> dict[str, int]:
        return {}

    def misfit(self) -> str:
        return ""

    def drop_restored(self) -> bool:
        return False


class Applied(list[bytes], NoStream):
    """Keeps its batches until it is cleared; `dumped` is true while it has blocks of a dump."""

    dumped = False

    def apply(self, payload: bytes) -> int:
        self.append(payload)
        return SHOWS.get(payload, 0) | NEW_RANK * (len(self) == 1)

    def rank(self) -> int:
        return 0

    def names_ranks(self) -> bool:
        return False

    def cleared(self) -> int:
        return ALL_TIERS

    def flaw(self) -> str:
        return "truncated"

    def restored(self) -> bool:
        return self.dumped and not self

    def names_restored(self, payload: bytes) -> bool:
        return payload == b"goes on"

    def drop_restored(self) -> bool:
        dropped, self.dumped = self.dumped, False
        return dropped
