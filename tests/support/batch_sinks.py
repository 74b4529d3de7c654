"""Where a listener's batches go in tests (`kvd.wire.applied_batches.BatchSink`)."""

from __future__ import annotations


class NoStream:
    """Takes batches and forgets them; the base of those that remember."""

    def apply(self, payload: bytes) -> int:
        return 0

    def clear(self) -> None:
        pass

    def restored(self) -> bool:
        return False

    def goes_on(self, payload: bytes) -> bool:
        return False

    @property
    def ignored(self) -> dict[str, int]:
        return {}

    def misfit(self) -> str:
        return ""

    def drop_restored(self) -> bool:
        return False
