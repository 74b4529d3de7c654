"""Decides whether the engine that speaks is the one that was heard before.

A connection that broke may have been made again to another process. Its replay server is asked for
the last accepted batch: an answer with that batch comes from the same engine, one with another
batch of that number from another engine. Batches that came before may wait in the queue still, so
it is asked for its own batch of the held number, too. How far that has come is the `IdentityCheck`,
and what the last one has left is the `Identity`: SAME, or UNKNOWN where the engine has not shown
what it is. An UNKNOWN engine speaks on, and with its next gap it is checked again.

                 may be   a replay shall bring
    check        other    the last   the held   identity   means
    ----------   ------   --------   --------   --------   -----------------------------------------
    NONE                                        either     nothing has cast doubt on the engine
    DUE          yes                            either     the next batch is held, or it is asked
    PROVING               yes        yes        either     a batch is held, its replay is to show it
    CONFIRMING                       yes        SAME       the engine is clear; whose is that batch?
    ASKING       yes      yes                   either     an idle engine is asked
    ANSWERED     yes                            either     the same, and it has answered

      ┌───────────── held, where UNKNOWN ─────────────┐
      │                                               v
    NONE ── doubted ──> DUE ── held ──────────────> PROVING ── proved, restarted ──> CONFIRMING
      ^                  │                            │ given up                       │ confirmed,
      ├──────────────────│────────────────────────────┴────────────────────────────────┘ given up
      │                  │
      │                  └── asked ──> ASKING ── proved, restarted, given up ──> ANSWERED
      └──────────────────────────────────────── ended, over one connection ─────────┘

Not in the picture: what is dropped, or ended over another connection, is DUE again. Before the
first batch there is no last one, so a held one leads to CONFIRMING. An engine that is doubted while
a batch is held is PROVING_DOUBTED or CONFIRMING_DOUBTED, and afterwards DUE. So is one
that is asked once more after its connection was lost (`CatchUp.begin`): another engine may answer.

`CHECK_AFTER` has all of it; what has no row there is a bug, and raises KeyError.
"""

from __future__ import annotations

from enum import Enum


class IdentityCheck(Enum):
    """The progress of the check whether the engine is the same."""

    NONE = "none"
    DUE = "due"
    PROVING = "proving"
    CONFIRMING = "confirming"
    PROVING_DOUBTED = "proving_doubted"
    CONFIRMING_DOUBTED = "confirming_doubted"
    ASKING = "asking"
    ANSWERED = "answered"


class Identity(Enum):
    """Knowledge about the engine since the last check."""

    SAME = "same"  # the one that was heard before, as far as anything shows
    UNKNOWN = "unknown"  # it has been asked, and has not shown that it is the same


class IdentityEvent(Enum):
    """An event of a check."""

    DOUBTED = "doubted"  # from here on it may be another engine
    HELD_BEHIND = "held_behind"  # a batch is held, and some have been accepted before
    HELD_FIRST = "held_first"  # a batch is held, and none has been accepted
    ASKED = "asked"  # an idle engine is asked
    PROVED = "proved"  # it has said the last accepted batch
    RESTARTED = "restarted"  # it is another one
    GIVEN_UP = "given_up"  # it has answered without what would show it, or not at all
    CONFIRMED = "confirmed"  # the batch of the held number is its own
    DROPPED = "dropped"  # the held batch is, or the connection over which it was asked
    ENDED = "ended"  # the answer of an idle engine has


_C, _E = IdentityCheck, IdentityEvent  # so that a row of the table is a line

CHECK_AFTER: dict[tuple[IdentityCheck, IdentityEvent], IdentityCheck] = {
    (_C.NONE, _E.DOUBTED): _C.DUE,
    (_C.NONE, _E.HELD_BEHIND): _C.PROVING,  # of one that is UNKNOWN
    (_C.NONE, _E.HELD_FIRST): _C.CONFIRMING,  # of one that is UNKNOWN
    (_C.NONE, _E.RESTARTED): _C.NONE,
    (_C.NONE, _E.DROPPED): _C.NONE,
    (_C.DUE, _E.DOUBTED): _C.DUE,
    (_C.DUE, _E.HELD_BEHIND): _C.PROVING,
    (_C.DUE, _E.HELD_FIRST): _C.CONFIRMING,
    (_C.DUE, _E.ASKED): _C.ASKING,
    (_C.DUE, _E.RESTARTED): _C.DUE,  # by the publisher that a batch names
    (_C.DUE, _E.DROPPED): _C.DUE,
    (_C.PROVING, _E.DOUBTED): _C.PROVING_DOUBTED,
    (_C.PROVING, _E.PROVED): _C.CONFIRMING,
    (_C.PROVING, _E.RESTARTED): _C.CONFIRMING,
    (_C.PROVING, _E.GIVEN_UP): _C.NONE,
    (_C.PROVING, _E.DROPPED): _C.DUE,
    (_C.CONFIRMING, _E.DOUBTED): _C.CONFIRMING_DOUBTED,
    (_C.CONFIRMING, _E.GIVEN_UP): _C.NONE,
    (_C.CONFIRMING, _E.CONFIRMED): _C.NONE,
    (_C.CONFIRMING, _E.DROPPED): _C.DUE,
    (_C.PROVING_DOUBTED, _E.DOUBTED): _C.PROVING_DOUBTED,
    (_C.PROVING_DOUBTED, _E.PROVED): _C.CONFIRMING_DOUBTED,
    (_C.PROVING_DOUBTED, _E.RESTARTED): _C.CONFIRMING_DOUBTED,
    (_C.PROVING_DOUBTED, _E.GIVEN_UP): _C.DUE,
    (_C.PROVING_DOUBTED, _E.DROPPED): _C.DUE,
    (_C.CONFIRMING_DOUBTED, _E.DOUBTED): _C.CONFIRMING_DOUBTED,
    (_C.CONFIRMING_DOUBTED, _E.GIVEN_UP): _C.DUE,
    (_C.CONFIRMING_DOUBTED, _E.CONFIRMED): _C.DUE,
    (_C.CONFIRMING_DOUBTED, _E.DROPPED): _C.DUE,
    # At the end, the connection it was asked over decides whether the answer still counts.
    (_C.ASKING, _E.DOUBTED): _C.ASKING,
    (_C.ASKING, _E.PROVED): _C.ANSWERED,
    (_C.ASKING, _E.RESTARTED): _C.ANSWERED,
    (_C.ASKING, _E.GIVEN_UP): _C.ANSWERED,
    (_C.ASKING, _E.DROPPED): _C.DUE,
    (_C.ASKING, _E.ENDED): _C.DUE,  # without a word of the last batch
    (_C.ANSWERED, _E.DOUBTED): _C.ANSWERED,
    (_C.ANSWERED, _E.RESTARTED): _C.ANSWERED,  # by what had arrived before
    (_C.ANSWERED, _E.DROPPED): _C.DUE,
    (_C.ANSWERED, _E.ENDED): _C.NONE,
}

# All other events leave it as it is.
IDENTITY_AFTER: dict[IdentityEvent, Identity] = {
    IdentityEvent.PROVED: Identity.SAME,
    IdentityEvent.RESTARTED: Identity.SAME,  # this one is heard from its beginning
    IdentityEvent.GIVEN_UP: Identity.UNKNOWN,
}

# Checks whose replay is to bring the last accepted batch, the batch of the held number, and all
# that an idle engine has.
_WANT_LAST = (IdentityCheck.PROVING, IdentityCheck.PROVING_DOUBTED, IdentityCheck.ASKING)
_WANT_HELD = (
    IdentityCheck.PROVING,
    IdentityCheck.CONFIRMING,
    IdentityCheck.PROVING_DOUBTED,
    IdentityCheck.CONFIRMING_DOUBTED,
)
_WANT_ALL = (IdentityCheck.ASKING, IdentityCheck.ANSWERED)


class EngineIdentity:
    """Tracks the publisher of one stream, as far as batches name it or replays prove it."""

    __slots__ = ("_named_at", "check", "heard", "identity", "publisher", "speaker")

    def __init__(self) -> None:
        self.check = IdentityCheck.NONE
        self.identity = Identity.SAME
        # Ids of the publisher, and of the one of the message at hand: 16 bytes, empty if not given.
        self.publisher = self.speaker = b""
        self.heard = b""  # the publisher that live messages named last
        self._named_at = 0  # the number that was expected when the publisher was first named

    def advance(self, event: IdentityEvent) -> None:
        self.check = CHECK_AFTER[self.check, event]
        self.identity = IDENTITY_AFTER.get(event, self.identity)
        if event is IdentityEvent.RESTARTED:
            self.publisher = self.speaker = b""

    def name(self, publisher: bytes, expected: int) -> None:
        """Notes who publishes, from the batch `expected` on: that does not say who has before."""
        if not self.publisher:
            self._named_at = expected
            self.publisher = publisher

    def is_named(self, expected: int) -> bool:
        """Returns whether a batch before `expected` was applied since the publisher is known."""
        return bool(self.publisher) and expected != self._named_at

    @property
    def is_unknown(self) -> bool:
        return self.identity is Identity.UNKNOWN

    @property
    def is_in_doubt(self) -> bool:
        """Returns whether the replay before the next held batch is to show who it is."""
        return self.check is IdentityCheck.DUE or self.is_unknown

    @property
    def wants_last(self) -> bool:
        """Returns whether a replay is to bring the last accepted batch once more."""
        return self.check in _WANT_LAST

    @property
    def wants_held(self) -> bool:
        """Returns whether a replay is to bring the engine's own batch of the held number."""
        return self.check in _WANT_HELD

    @property
    def is_asking(self) -> bool:
        """Returns whether an idle engine is being asked."""
        return self.check in _WANT_ALL
