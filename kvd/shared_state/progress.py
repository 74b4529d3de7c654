"""How far the steps of each writer are known here.

    numbers    writer ──> number up to which all its steps are in here
    ended      dots of ended requests, as far as `numbers` do not include them
    behind     writer ──> number of a step of it that exists, although earlier ones are missing here

A booking that a process could not take over counts as not heard: its number, and all later ones of
its writer, are not announced to other processes, so each number that is announced is true.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping

from kvd.shared_state.entries import BEGINNING, Dot

MAX_ENDED = 65_536  # dots in `ended`; beyond that the oldest are forgotten

# Dots examined between two checkpoints: under 1 ms.
DOTS_AT_ONCE = 512

# Time after which a silent writer without live requests is forgotten, since each restart makes a
# new writer. If the writer is still there, its next step shows as a gap, and its view is read.
FORGET_S = 3600.0


class Progress:
    """The numbers of all writers, also of this process."""

    def __init__(self, writer: str, clock: Callable[[], float]) -> None:
        self.writer = writer
        self.own = 0  # number of the last step of this process
        self.settled = 0  # number of its last step that has come back in the stream
        self.position = BEGINNING  # up to which the stream has been read
        self.numbers: dict[str, int] = {}
        self.behind: dict[str, int] = {}
        self.ended: OrderedDict[Dot, None] = OrderedDict()  # the oldest first
        self.gaps = 0
        self.forgotten = 0  # dots beyond MAX_ENDED
        self._clock = clock
        self._heard_at: dict[str, float] = {}  # when a writer's number last grew
        self._lacking: dict[str, int] = {}  # by writer: its first booking that was left out here

    # ---- steps

    def hear(self, writer: str, number: int) -> None:
        """Notes that all steps of a writer up to a number are in here."""
        if number > self.numbers.get(writer, 0):
            self.numbers[writer] = number
            self._heard_at[writer] = self._clock()

    def missed(self, writer: str, number: int) -> None:
        """Notes that steps of a writer up to a number exist, some of which are missing here."""
        if writer not in self.behind:
            self.gaps += 1
        self.behind[writer] = max(self.behind.get(writer, 0), number)

    def catches_up(self, writer: str) -> bool:
        """Returns whether a writer's missing steps are in here by now, or none were missing."""
        if self.numbers.get(writer, 0) >= self.behind.get(writer, 0):
            self.behind.pop(writer, None)
        return writer not in self.behind

    def leave_out(self, dot: Dot) -> None:
        """Notes a booking that could not be taken over here."""
        self._lacking[dot.writer] = min(dot.number, self._lacking.get(dot.writer, dot.number))

    def has_all(self, numbers: Mapping[str, int]) -> bool:
        """Returns whether all steps up to these numbers, by writer, are in here."""
        return all(self._whole(each) >= last for each, last in numbers.items())

    def all_numbers(self) -> dict[str, int]:
        """Returns the numbers of all writers, with that of this process."""
        return self.numbers | {self.writer: self.own}

    def whole_numbers(self) -> dict[str, int]:
        """Returns, by writer, up to which number its steps are in here, and none was left out."""
        return {each: self._whole(each) for each in self.numbers} | {self.writer: self.own}

    def lately_heard(self) -> dict[str, int]:
        """Returns the whole numbers of the writers that have recently sent steps."""
        since = self._clock() - FORGET_S / 2
        return {each: self._whole(each) for each, at in self._heard_at.items() if at >= since}

    def _whole(self, writer: str) -> int:
        number = self.numbers.get(writer, 0)
        return min(number, self._lacking.get(writer, number + 1) - 1)

    # ---- bookings

    def has_heard(self, dot: Dot) -> bool:
        """Returns whether a booking is in here, or has been and has ended."""
        return self._is_counted(dot) or dot in self.ended

    def _is_counted(self, dot: Dot) -> bool:
        number = self.own if dot.writer == self.writer else self._whole(dot.writer)
        return dot.number <= number

    def note_ended(self, dot: Dot) -> None:
        """Notes the end of a booking, perhaps before all earlier steps of its writer are here."""
        if not self.has_heard(dot):
            self.ended[dot] = None
            if len(self.ended) > MAX_ENDED:
                self.ended.popitem(last=False)
                self.forgotten += 1

    # ---- keeping

    def forget_silent(self, living: Collection[str]) -> None:
        """Forgets writers that have been silent for long and have no live requests."""
        before = self._clock() - FORGET_S
        for writer, at in list(self._heard_at.items()):
            if at < before and writer not in living:
                del self.numbers[writer], self._heard_at[writer]
                self._lacking.pop(writer, None)

    def forget_counted(self) -> Iterator[None]:
        """Forgets ended bookings that the numbers include by now; rests at every yield."""
        for number, dot in enumerate(list(self.ended), 1):
            if self._is_counted(dot):
                self.ended.pop(dot, None)
            if number % DOTS_AT_ONCE == 0:
                yield
