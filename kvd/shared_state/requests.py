"""What is known of a live request here, and as steps and views of other processes describe it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvd.shared_state.entries import Dot, Outputs, Position
from kvd.slots.rebooking import Booking
from kvd.wire.lifecycle import Face
from kvd_core.ledger.journal import Booked, OtherRecord, Stepped


@dataclass(frozen=True, slots=True)
class Seen:
    """Which steps a request's description already has: later ones count."""

    position: Position
    writer: str
    number: int

    @classmethod
    def at_booking(cls, dot: Dot) -> Seen:
        """Returns that of a fresh booking: all later steps count, also our own unsent ones."""
        return cls(Position(-1, 0), dot.writer, dot.number)

    def covers(self, step: Dot, position: Position) -> bool:
        """Returns whether a step, which has this position in the stream, is in the description."""
        if step.writer == self.writer:
            return step.number <= self.number
        return position <= self.position


@dataclass(slots=True)
class ForeignBooking:
    """A booking of another process, to be booked here."""

    block_size: int
    booking: Booking
    booked_at: float  # seconds of the clock here


@dataclass(frozen=True, slots=True)
class ForeignRequest:
    """A live request as another process describes it."""

    booked: ForeignBooking
    dot: Dot
    seen: Seen
    outputs: list[Outputs]  # the output blocks that the booking already has


@dataclass(slots=True)
class Known:
    """A request that lives, as far as this process knows."""

    dot: Dot
    seen: Seen
    booked_at: float  # seconds of the clock here
    face: Face | None  # where it is booked here; None: it waits for a rank
    also: tuple[Dot, ...] = ()  # other dots that it has elsewhere, where it was restored
    waiting: ForeignBooking | None = None  # until it has a rank
    outputs: dict[str, Outputs] = field(default_factory=dict)  # as other writers reported them

    @property
    def dots(self) -> tuple[Dot, ...]:
        return (self.dot, *self.also)

    @property
    def foreign_outputs(self) -> int:
        return sum(each.blocks for each in self.outputs.values())


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """One step of another writer."""

    dot: Dot  # the writer and number of this step
    record: Booked | Stepped | OtherRecord
    request_dot: Dot | None  # the dot of the step's request, if known
    position: Position  # in the stream
