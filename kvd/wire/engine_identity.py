"""Is the engine that speaks the one that was heard before? What is asked about it, and answered.

A connection that broke may have been made again to another process. Its replay server is asked for
the last accepted batch: whoever has said that is the same engine, and who has said another of that
number is another. What is being asked is the `Question`:

                 may be   a replay shall bring
    question     other    the last   the held   means
    ----------   ------   --------   --------   ----------------------------------------------------
    NONE                                        nothing has cast doubt on the engine
    DUE          yes                            the next batch is held, or an idle engine asked
    PROVING               yes        yes        the replay before the held batch is to tell
    CONFIRMING                       yes        the last is clear; whose is the held one?
    ASKING       yes      yes                   asked without a held batch
    ANSWERED     yes                            so asked, it has shown what it is

    PROVING_DOUBTED, CONFIRMING_DOUBTED    the same, and doubted again meanwhile: DUE afterwards

       NONE ── doubted ──> DUE ── held ──> PROVING ── proved, restarted ──> CONFIRMING
        ^ ^                 │ ^               └── given up ──> NONE          └── confirmed ──> NONE
        │ └─ held, UNKNOWN  │ └─ dropped, or doubted meanwhile: from any of these
        │                   └─ asked ──> ASKING ── proved, restarted, given up ──> ANSWERED
        └───────────────────────────────── ended, over one and the same connection ──┘

`QUESTION_AFTER` has all of it; what has no row there is a bug, and raises KeyError.

What the last question has left is the `Identity`: SAME, or UNKNOWN where the engine has been asked
and has not shown what it is. An engine that is UNKNOWN speaks on, and with its next gap it is asked
again. All combinations of the two occur.
"""

from __future__ import annotations

from enum import Enum


class Question(Enum):
    """What is being asked about the engine."""

    NONE = "none"
    DUE = "due"
    PROVING = "proving"
    CONFIRMING = "confirming"
    PROVING_DOUBTED = "proving_doubted"
    CONFIRMING_DOUBTED = "confirming_doubted"
    ASKING = "asking"
    ANSWERED = "answered"


class Identity(Enum):
    """What is known of the engine since the last question."""

    SAME = "same"  # the one that was heard before, as far as anything tells
    UNKNOWN = "unknown"  # it has been asked, and has not shown that it is the same


class IdentityEvent(Enum):
    """What happens to the question."""

    DOUBTED = "doubted"  # from here on it may be another engine
    HELD_BEHIND = "held_behind"  # a batch is held, and some have been accepted before
    HELD_FIRST = "held_first"  # a batch is held, and none has been accepted
    ASKED = "asked"  # an idle engine is asked
    PROVED = "proved"  # it has said the last accepted batch
    RESTARTED = "restarted"  # it is another one
    GIVEN_UP = "given_up"  # it has answered without what would tell, or not at all
    CONFIRMED = "confirmed"  # the batch of the held number is its own
    DROPPED = "dropped"  # the held batch is, or the connection over which it was asked
    ENDED = "ended"  # the answer of an idle engine has


QUESTION_AFTER: dict[tuple[Question, IdentityEvent], Question] = {
    (Question.NONE, IdentityEvent.DOUBTED): Question.DUE,
    (Question.NONE, IdentityEvent.HELD_BEHIND): Question.PROVING,  # of one that is UNKNOWN
    (Question.NONE, IdentityEvent.HELD_FIRST): Question.CONFIRMING,  # of one that is UNKNOWN
    (Question.NONE, IdentityEvent.RESTARTED): Question.NONE,
    (Question.NONE, IdentityEvent.DROPPED): Question.NONE,
    (Question.DUE, IdentityEvent.DOUBTED): Question.DUE,
    (Question.DUE, IdentityEvent.HELD_BEHIND): Question.PROVING,
    (Question.DUE, IdentityEvent.HELD_FIRST): Question.CONFIRMING,
    (Question.DUE, IdentityEvent.ASKED): Question.ASKING,
    (Question.DUE, IdentityEvent.RESTARTED): Question.DUE,  # by the publisher that a batch names
    (Question.DUE, IdentityEvent.DROPPED): Question.DUE,
    (Question.PROVING, IdentityEvent.DOUBTED): Question.PROVING_DOUBTED,
    (Question.PROVING, IdentityEvent.PROVED): Question.CONFIRMING,
    (Question.PROVING, IdentityEvent.RESTARTED): Question.CONFIRMING,
    (Question.PROVING, IdentityEvent.GIVEN_UP): Question.NONE,
    (Question.PROVING, IdentityEvent.DROPPED): Question.DUE,
    (Question.CONFIRMING, IdentityEvent.DOUBTED): Question.CONFIRMING_DOUBTED,
    (Question.CONFIRMING, IdentityEvent.GIVEN_UP): Question.NONE,
    (Question.CONFIRMING, IdentityEvent.CONFIRMED): Question.NONE,
    (Question.CONFIRMING, IdentityEvent.DROPPED): Question.DUE,
    (Question.PROVING_DOUBTED, IdentityEvent.DOUBTED): Question.PROVING_DOUBTED,
    (Question.PROVING_DOUBTED, IdentityEvent.PROVED): Question.CONFIRMING_DOUBTED,
    (Question.PROVING_DOUBTED, IdentityEvent.RESTARTED): Question.CONFIRMING_DOUBTED,
    (Question.PROVING_DOUBTED, IdentityEvent.GIVEN_UP): Question.DUE,
    (Question.PROVING_DOUBTED, IdentityEvent.DROPPED): Question.DUE,
    (Question.CONFIRMING_DOUBTED, IdentityEvent.DOUBTED): Question.CONFIRMING_DOUBTED,
    (Question.CONFIRMING_DOUBTED, IdentityEvent.GIVEN_UP): Question.DUE,
    (Question.CONFIRMING_DOUBTED, IdentityEvent.CONFIRMED): Question.DUE,
    (Question.CONFIRMING_DOUBTED, IdentityEvent.DROPPED): Question.DUE,
    # Over which connection it was asked tells, at the end, whether the answer still counts.
    (Question.ASKING, IdentityEvent.DOUBTED): Question.ASKING,
    (Question.ASKING, IdentityEvent.PROVED): Question.ANSWERED,
    (Question.ASKING, IdentityEvent.RESTARTED): Question.ANSWERED,
    (Question.ASKING, IdentityEvent.GIVEN_UP): Question.ANSWERED,
    (Question.ASKING, IdentityEvent.DROPPED): Question.DUE,
    (Question.ASKING, IdentityEvent.ENDED): Question.DUE,  # without a word of the last batch
    (Question.ANSWERED, IdentityEvent.DOUBTED): Question.ANSWERED,
    (Question.ANSWERED, IdentityEvent.RESTARTED): Question.ANSWERED,  # by what had arrived before
    (Question.ANSWERED, IdentityEvent.DROPPED): Question.DUE,
    (Question.ANSWERED, IdentityEvent.ENDED): Question.NONE,
}

# All other events leave it as it is.
IDENTITY_AFTER: dict[IdentityEvent, Identity] = {
    IdentityEvent.PROVED: Identity.SAME,
    IdentityEvent.RESTARTED: Identity.SAME,  # this one is heard from its beginning
    IdentityEvent.GIVEN_UP: Identity.UNKNOWN,
}

# Questions whose replay is to bring the last accepted batch, the batch of the held number, and all
# that an idle engine has.
_WANT_LAST = (Question.PROVING, Question.PROVING_DOUBTED, Question.ASKING)
_WANT_HELD = (
    Question.PROVING,
    Question.CONFIRMING,
    Question.PROVING_DOUBTED,
    Question.CONFIRMING_DOUBTED,
)
_WANT_ALL = (Question.ASKING, Question.ANSWERED)


class EngineIdentity:
    """Who speaks on one stream, as far as batches name their publisher or replays prove it."""

    __slots__ = ("_named_at", "heard", "identity", "publisher", "question", "speaker")

    def __init__(self) -> None:
        self.question = Question.NONE
        self.identity = Identity.SAME
        # Who publishes, as 16 bytes, and who has published the message at hand; empty: not said.
        self.publisher = self.speaker = b""
        self.heard = b""  # the publisher that live messages named last
        self._named_at = 0  # the number that was expected when the publisher was first named

    def advance(self, event: IdentityEvent) -> None:
        self.question = QUESTION_AFTER[self.question, event]
        self.identity = IDENTITY_AFTER.get(event, self.identity)
        if event is IdentityEvent.RESTARTED:
            self.publisher = self.speaker = b""

    def name(self, publisher: bytes, expected: int) -> None:
        """Notes who publishes, from the batch `expected` on: that does not say who has before."""
        if not self.publisher:
            self._named_at = expected
            self.publisher = publisher

    def is_named(self, expected: int) -> bool:
        """Whether a batch before `expected` has been applied since it is known who publishes."""
        return bool(self.publisher) and expected != self._named_at

    @property
    def is_unknown(self) -> bool:
        return self.identity is Identity.UNKNOWN

    @property
    def is_in_doubt(self) -> bool:
        """Whether the replay before the next held batch is to tell who it is."""
        return self.question is Question.DUE or self.is_unknown

    @property
    def wants_last(self) -> bool:
        """Whether a replay is to bring the last accepted batch once more."""
        return self.question in _WANT_LAST

    @property
    def wants_held(self) -> bool:
        """Whether a replay is to bring the engine's own batch of the held number."""
        return self.question in _WANT_HELD

    @property
    def is_asking(self) -> bool:
        """Whether an idle engine is being asked."""
        return self.question in _WANT_ALL
