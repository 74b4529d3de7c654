"""Decides whether the engine that publishes is the same as before.

A connection that broke may be made again to another process. So the replay server is asked for the
last accepted batch: the same engine answers with that batch, another engine with a different batch
of that number. A held batch may have been queued by the previous engine, so the engine is asked for
its own batch of the held number, too. `IdentityCheck` is the progress of this check, and `Identity`
is the result of the last one: SAME, or UNKNOWN if the engine has proved nothing. Batches of an
UNKNOWN engine are applied, and it is checked again at its next gap.

                 may be   a replay shall bring
    check        other    the last   the held   identity   means
    ----------   ------   --------   --------   --------   -----------------------------------------
    NONE                                        either     nothing has cast doubt on the engine
    DUE          yes                            either     hold the next batch, or ask the engine
    PROVING               yes        yes        either     a batch is held; its replay is to prove
    CONFIRMING                       yes        SAME       engine proved; is the held batch its own?
    ASKING       yes      yes                   either     an idle engine is asked
    ANSWERED     yes                            either     the idle engine has answered

      ┌───────────── held, where UNKNOWN ─────────────┐
      │                                               v
    NONE ── doubted ──> DUE ── held ──────────────> PROVING ── proved, restarted ──> CONFIRMING
      ^                  │                            │ given up                       │ confirmed,
      ├──────────────────│────────────────────────────┴────────────────────────────────┘ given up
      │                  │
      │                  └── asked ──> ASKING ── proved, restarted, given up ──> ANSWERED
      └──────────────────────────────────────── ended, over one connection ─────────┘

Not in the picture: a check that is dropped, or ends over another connection, is DUE again. Before
the first batch there is no last one to ask for, so a held batch leads to CONFIRMING at once. An
engine that is doubted while a batch is held becomes PROVING_DOUBTED or CONFIRMING_DOUBTED, and DUE
afterwards. So does one that is asked once more after its connection was lost (`CatchUp.begin`),
since another engine may answer.

`CHECK_AFTER` is the complete table; an event without a row there is a bug, and raises KeyError.
"""

from __future__ import annotations

from enum import Enum


class IdentityCheck(Enum):
    """The progress of the check whether the engine is still the same."""

    NONE = "none"
    DUE = "due"
    PROVING = "proving"
    CONFIRMING = "confirming"
    PROVING_DOUBTED = "proving_doubted"
    CONFIRMING_DOUBTED = "confirming_doubted"
    ASKING = "asking"
    ANSWERED = "answered"


class Identity(Enum):
    """The result of the last check."""

    SAME = "same"  # nothing shows that it is another engine than before
    UNKNOWN = "unknown"  # it was asked, and has not proved that it is the same


class IdentityEvent(Enum):
    """An event of a check."""

    DOUBTED = "doubted"  # from now on batches may be another engine's
    HELD_BEHIND = "held_behind"  # a batch is held, and some have been accepted before
    HELD_FIRST = "held_first"  # a batch is held, and none has been accepted
    ASKED = "asked"  # an idle engine is asked
    PROVED = "proved"  # it has repeated the last accepted batch
    RESTARTED = "restarted"  # it is another engine
    GIVEN_UP = "given_up"  # it has answered without a proof, or not at all
    CONFIRMED = "confirmed"  # it has sent its own batch of the held number
    DROPPED = "dropped"  # the held batch was dropped, or the connection of the request was lost
    ENDED = "ended"  # the answer of an idle engine is over


_C, _E = IdentityCheck, IdentityEvent  # short names, so that each row of the table is one line

CHECK_AFTER: dict[tuple[IdentityCheck, IdentityEvent], IdentityCheck] = {
    (_C.NONE, _E.DOUBTED): _C.DUE,
    (_C.NONE, _E.HELD_BEHIND): _C.PROVING,  # of an UNKNOWN engine
    (_C.NONE, _E.HELD_FIRST): _C.CONFIRMING,  # of an UNKNOWN engine
    (_C.NONE, _E.RESTARTED): _C.NONE,
    (_C.NONE, _E.DROPPED): _C.NONE,
    (_C.DUE, _E.DOUBTED): _C.DUE,
    (_C.DUE, _E.HELD_BEHIND): _C.PROVING,
    (_C.DUE, _E.HELD_FIRST): _C.CONFIRMING,
    (_C.DUE, _E.ASKED): _C.ASKING,
    (_C.DUE, _E.RESTARTED): _C.DUE,  # a batch named another publisher
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
    # At the end, an answer counts only if the connection of its request was not lost meanwhile.
    (_C.ASKING, _E.DOUBTED): _C.ASKING,
    (_C.ASKING, _E.PROVED): _C.ANSWERED,
    (_C.ASKING, _E.RESTARTED): _C.ANSWERED,
    (_C.ASKING, _E.GIVEN_UP): _C.ANSWERED,
    (_C.ASKING, _E.DROPPED): _C.DUE,
    (_C.ASKING, _E.ENDED): _C.DUE,  # the answer did not reach the last batch
    (_C.ANSWERED, _E.DOUBTED): _C.ANSWERED,
    (_C.ANSWERED, _E.RESTARTED): _C.ANSWERED,  # shown by a batch that had arrived before
    (_C.ANSWERED, _E.DROPPED): _C.DUE,
    (_C.ANSWERED, _E.ENDED): _C.NONE,
}

# All other events leave the identity as it is.
IDENTITY_AFTER: dict[IdentityEvent, Identity] = {
    IdentityEvent.PROVED: Identity.SAME,
    IdentityEvent.RESTARTED: Identity.SAME,  # this one is heard from its beginning
    IdentityEvent.GIVEN_UP: Identity.UNKNOWN,
}

# Checks whose replay is to bring the last accepted batch; the engine's own batch of the held
# number; all batches that an idle engine has.
_WANT_LAST = (IdentityCheck.PROVING, IdentityCheck.PROVING_DOUBTED, IdentityCheck.ASKING)
_WANT_HELD = (
    IdentityCheck.PROVING,
    IdentityCheck.CONFIRMING,
    IdentityCheck.PROVING_DOUBTED,
    IdentityCheck.CONFIRMING_DOUBTED,
)
_WANT_ALL = (IdentityCheck.ASKING, IdentityCheck.ANSWERED)


class EngineIdentity:
    """Tracks the engine of one stream, as far as batches name it or replays prove it."""

    __slots__ = ("_named_at", "check", "heard", "identity", "publisher", "speaker")

    def __init__(self) -> None:
        self.check = IdentityCheck.NONE
        self.identity = Identity.SAME
        # Ids of the stream's publisher and of the present message's: 16 bytes, empty if not named.
        self.publisher = self.speaker = b""
        self.heard = b""  # the publisher that the last live message named
        self._named_at = 0  # number that was expected when the publisher was first named

    def advance(self, event: IdentityEvent) -> None:
        self.check = CHECK_AFTER[self.check, event]
        self.identity = IDENTITY_AFTER.get(event, self.identity)
        if event is IdentityEvent.RESTARTED:
            self.publisher = self.speaker = b""

    def name(self, publisher: bytes, expected: int) -> None:
        """Notes the publisher from the batch `expected` on; earlier batches may be another's."""
        if not self.publisher:
            self._named_at = expected
            self.publisher = publisher

    def is_named(self, expected: int) -> bool:
        """Returns whether a batch has been applied since the publisher is known."""
        return bool(self.publisher) and expected != self._named_at

    @property
    def is_unknown(self) -> bool:
        return self.identity is Identity.UNKNOWN

    @property
    def is_in_doubt(self) -> bool:
        """Returns whether the replay for the next held batch has to prove the engine's identity."""
        return self.check is IdentityCheck.DUE or self.is_unknown

    @property
    def wants_last(self) -> bool:
        """Returns whether a replay has to bring the last accepted batch once more."""
        return self.check in _WANT_LAST

    @property
    def wants_held(self) -> bool:
        """Returns whether a replay has to bring the engine's own batch of the held number."""
        return self.check in _WANT_HELD

    @property
    def is_asking(self) -> bool:
        """Returns whether an idle engine is being asked."""
        return self.check in _WANT_ALL
