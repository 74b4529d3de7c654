"""Which requests observers are told of, where telling them of all would cost too much."""

from __future__ import annotations


class Sample:
    """Takes a request if the hash of its id ends with enough zeros, so all its steps are taken.

    About `rate` of them a second are taken, however many there are.
    """

    def __init__(self, rate: int) -> None:
        self.mask = 0  # of the hash; 0: all are taken
        self._rate = rate
        self._is_whole = False
        self._taken = 0

    def take_all(self) -> None:
        """Takes every request from now on."""
        self.mask, self._is_whole = 0, True

    def takes(self, request_id: str) -> bool:
        return not hash(request_id) & self.mask

    def count(self) -> None:
        """Counts a request that was taken."""
        self._taken += 1

    def adjust(self, seconds: float) -> None:
        """Takes more or fewer from now on, by how many were taken in the last `seconds`."""
        wanted = self._rate * seconds
        if self._taken > 2 * wanted and not self._is_whole:
            self.mask = self.mask << 1 | 1
        elif self._taken < wanted / 2:
            self.mask >>= 1
        self._taken = 0
