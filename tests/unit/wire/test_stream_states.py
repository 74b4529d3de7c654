"""The state tables of a stream, and random lives with the status and health of a plain model."""

from __future__ import annotations

import random

import pytest

from kvd.wire.cursor import Verdict
from kvd.wire.engine_identity import (
    CHECK_AFTER,
    IDENTITY_AFTER,
    EngineIdentity,
    Identity,
    IdentityCheck,
    IdentityEvent,
)
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import ReplayEnd
from kvd.wire.stream_link import LINK_AFTER, STATUS, LinkEvent, LinkState, StreamLink
from kvd.wire.stream_stats import StreamStats
from kvd_core.index.prefix_index import CLEARED, FLAWED, NEW_RANK
from tests.models import stream_model
from tests.support.batch_sinks import Applied
from tests.support.budget import scaled

# ---- the link

# Impossible events: an ended socket sends none, and a new socket only follows an end.
LINK_BUGS = {
    (LinkState.JOINED, LinkEvent.CONNECTING),
    (LinkState.BROKEN, LinkEvent.CONNECTING),
    (LinkState.FAILED, LinkEvent.JOINED),
    (LinkState.FAILED, LinkEvent.LOST),
    (LinkState.PAUSED, LinkEvent.JOINED),
    (LinkState.PAUSED, LinkEvent.LOST),
    (LinkState.PAUSED, LinkEvent.FAILED),
}
# The states that an event leads to, from any state in which it may come.
LINK_LEADS_TO = {
    LinkEvent.CONNECTING: {LinkState.PENDING},
    LinkEvent.JOINED: {LinkState.JOINED},
    LinkEvent.LOST: {LinkState.PENDING, LinkState.BROKEN},
    LinkEvent.FAILED: {LinkState.FAILED},
    LinkEvent.PAUSED: {LinkState.PAUSED},
}


def report(link: StreamLink, event: LinkEvent) -> None:
    {
        LinkEvent.CONNECTING: link.connecting,
        LinkEvent.JOINED: link.joined,
        LinkEvent.LOST: lambda: link.lost("lost", 1.0),
        LinkEvent.FAILED: lambda: link.failed("failed", 1.0),
        LinkEvent.PAUSED: lambda: link.paused(1.0),
    }[event]()


@pytest.mark.parametrize("event", LinkEvent)
@pytest.mark.parametrize("state", LinkState)
def test_every_event_of_a_link_has_a_row_or_raises(state: LinkState, event: LinkEvent) -> None:
    link = StreamLink(StreamStats())
    link.state = state
    if (state, event) in LINK_BUGS:
        with pytest.raises(KeyError):
            report(link, event)
        assert link.state is state
    else:
        report(link, event)
        assert link.state is LINK_AFTER[state, event]
        assert link.state in LINK_LEADS_TO[event]


def test_every_state_of_a_link_is_reached_and_has_a_status() -> None:
    assert {LinkState.PENDING, *LINK_AFTER.values()} == set(LinkState) == set(STATUS)


@pytest.mark.parametrize("receiving", [False, True])
@pytest.mark.parametrize("state", LinkState)
def test_status_follows_from_the_state(state: LinkState, receiving: bool) -> None:
    link = StreamLink(StreamStats())
    link.state, link.is_receiving = state, receiving
    at_work = "active" if receiving else "pending"
    shown = {LinkState.JOINED: at_work, LinkState.BROKEN: at_work}
    assert link.status == shown.get(state, state.value)
    assert link.connected is (state is LinkState.JOINED)


# ---- the identity

IDLE = {IdentityCheck.NONE, IdentityCheck.DUE}
IN_REPLAY = {IdentityCheck.PROVING, IdentityCheck.PROVING_DOUBTED}
OF_HELD = IN_REPLAY | {IdentityCheck.CONFIRMING, IdentityCheck.CONFIRMING_DOUBTED}
ASKED = {IdentityCheck.ASKING, IdentityCheck.ANSWERED}
IN_PEACE = (IdentityCheck.NONE, Identity.SAME)
# The states in which each event may come; in all others it is a bug.
COMES_IN = {
    IdentityEvent.DOUBTED: set(IdentityCheck),  # a connection may break at any time
    IdentityEvent.DROPPED: set(IdentityCheck),  # a listener may be paused at any time
    IdentityEvent.HELD_BEHIND: IDLE,
    IdentityEvent.HELD_FIRST: IDLE,
    IdentityEvent.ASKED: {IdentityCheck.DUE},
    IdentityEvent.PROVED: IN_REPLAY | {IdentityCheck.ASKING},  # the last batch was requested
    IdentityEvent.RESTARTED: IDLE | IN_REPLAY | ASKED,
    IdentityEvent.GIVEN_UP: OF_HELD | {IdentityCheck.ASKING},
    IdentityEvent.CONFIRMED: {IdentityCheck.CONFIRMING, IdentityCheck.CONFIRMING_DOUBTED},
    IdentityEvent.ENDED: ASKED,
}


@pytest.mark.parametrize("event", IdentityEvent)
@pytest.mark.parametrize("check", IdentityCheck)
def test_every_event_of_an_identity_has_a_row_or_raises(
    check: IdentityCheck, event: IdentityEvent
) -> None:
    identity = EngineIdentity()
    identity.check = check
    if check in COMES_IN[event]:
        identity.advance(event)
        assert identity.check is CHECK_AFTER[check, event]
    else:
        with pytest.raises(KeyError):
            identity.advance(event)
        assert (identity.check, identity.identity) == (check, Identity.SAME)


@pytest.mark.parametrize("before", Identity)
@pytest.mark.parametrize("event", IdentityEvent)
def test_what_a_check_leaves(event: IdentityEvent, before: Identity) -> None:
    identity = EngineIdentity()
    identity.identity = before
    identity.check = next(check for check in IdentityCheck if check in COMES_IN[event])
    identity.advance(event)
    assert identity.identity is IDENTITY_AFTER.get(event, before)


def test_a_doubt_is_never_forgotten() -> None:
    """It ends only by an idle engine's answer over one connection, or by a held batch."""
    doubted = set(IdentityCheck) - {
        IdentityCheck.NONE,
        IdentityCheck.PROVING,
        IdentityCheck.CONFIRMING,
    }
    ended = {
        (before, event)
        for (before, event), after in CHECK_AFTER.items()
        if before in doubted and after not in doubted
    }
    assert ended == {
        (IdentityCheck.DUE, IdentityEvent.HELD_BEHIND),
        (IdentityCheck.DUE, IdentityEvent.HELD_FIRST),
        (IdentityCheck.ANSWERED, IdentityEvent.ENDED),
    }


def test_a_publisher_is_forgotten_at_a_restart() -> None:
    identity = EngineIdentity()
    identity.name(b"a" * 16, 3)
    identity.name(b"b" * 16, 4)  # ignored, as an id is known already
    assert (identity.publisher, identity.is_named(3), identity.is_named(4)) == (
        b"a" * 16,
        False,
        True,
    )
    identity.advance(IdentityEvent.RESTARTED)
    assert (identity.publisher, identity.is_named(5)) == (b"", False)


# ---- random lives

STEPS = 60
SEEDS = scaled(60)


class RecordingIndex(Applied):
    """A stream of one rank; the last word of a batch determines what `apply` reports."""

    def apply(self, payload: bytes) -> int:
        self.append(payload)
        shows = {b"emptied": CLEARED, b"flawed": FLAWED}.get(payload.split()[-1], 0)
        return shows | NEW_RANK * (len(self) == 1)


class Life:
    """A stream that gets its task's calls in random order, and the history of these."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.can_ask = self.chance.random() < 0.8
        server = "tcp://127.0.0.1:2" if self.can_ask else None
        self.listener = EventStream("1:0", "tcp://127.0.0.1:1", RecordingIndex(), server)  # type: ignore[arg-type]
        self.now = 0.0
        self.history: list[stream_model.Happened] = []
        self.engine = 0
        self.in_session = False
        self.has_paused = False
        self.batches: dict[int, bytes] = {}  # batches of the present engine, by number

    def happen(self, what: str, *details: object) -> None:
        self.history.append((what, self.now, *details))

    def step(self) -> None:
        if self.chance.random() < 0.3:
            self.now += self.chance.choice((0.5, 10.0, 29.0, 31.0))
        steps = [self.pause, self.fail] if not self.has_paused else []
        if not self.in_session:
            steps = [*steps, self.connect, self.connect, self.connect]
        else:
            steps += [self.receive, self.lose] + [self.join] * 4 * (not self.listener.connected)
            steps += [self.batch] * 12
        self.chance.choice(steps)()

    # ---- the connection

    def connect(self) -> None:
        self.listener.connecting()
        self.in_session, self.has_paused = True, False
        self.happen("connecting")

    def receive(self) -> None:
        self.listener.receiving()
        self.happen("receiving")

    def join(self) -> None:
        self.listener.joined()
        self.happen("joined")

    def lose(self) -> None:
        self.listener.lost_connection("lost", self.now)
        self.happen("lost")

    def fail(self) -> None:
        self.forget_held()
        self.listener.failed("failed", self.now)
        self.in_session = False
        self.happen("failed")

    def pause(self) -> None:
        self.forget_held()
        self.listener.paused(self.now)
        self.in_session, self.has_paused = False, True
        self.happen("paused")

    def forget_held(self) -> None:
        """Makes the held batch a plain one when it comes again."""
        if (held := self.listener.catch_up.held) is not None:
            del self.batches[held[0]]

    # ---- batches

    def batch(self) -> None:
        """Takes the next step of a replay or an answer under way, or begins something new."""
        catch_up = self.listener.catch_up
        if catch_up.held is not None:
            self.replay()
        elif self.listener.identity.is_asking:
            self.answer()
        elif catch_up.asks and self.chance.random() < 0.7:
            catch_up.ask()
            self.happen("asked")
        elif self.chance.random() < 0.1 and self.listener.cursor.last in self.batches:
            self.repeat()
        else:
            self.receive_next()

    def text(self, seq: int, kind: str = "plain") -> bytes:
        return b"%d of %d %s" % (seq, self.engine, kind.encode())

    def repeat(self) -> None:
        last = self.listener.cursor.last
        assert last is not None
        if self.listener.take(last, self.batches[last]):
            assert self.listener.catch_up.judge() is Verdict.STALE

    def receive_next(self) -> None:
        kind = self.chance.choice(("plain", "plain", "plain", "flawed", "emptied"))
        gap = self.chance.choice((0, 0, 0, 1, 3))
        seq = self.listener.cursor.expected + gap
        payload = self.batches[seq] = self.text(seq, kind)
        if self.listener.take(seq, payload):
            assert self.listener.catch_up.judge() is not Verdict.STALE
            self.happen("held", kind, gap)
        else:
            self.happen("applied", kind)

    def replay(self) -> None:
        """Has a replay bring some batches, and applies the held batch."""
        catch_up = self.listener.catch_up
        assert catch_up.held is not None
        seq, payload = catch_up.held
        how = self.chance.choice(("same", "forgotten", "silent")) if self.can_ask else "silent"
        if catch_up.wanted().start < self.listener.cursor.expected and self.chance.random() < 0.3:
            how = "other"
            self.start_engine()
            self.batches[seq] = payload
            assert self.bring(ReplayEnd.MARKER) is ReplayEnd.OTHER_ENGINE
        if how in ("same", "other"):
            assert self.bring(ReplayEnd.MARKER) in (ReplayEnd.MARKER, ReplayEnd.REACHED)
        elif self.can_ask:
            catch_up.begin()
            catch_up.end(ReplayEnd.SILENT if how == "silent" else ReplayEnd.MARKER)
        catch_up.apply_held()
        self.happen("replay", how)

    def answer(self) -> None:
        """Has the idle engine answer in one of the possible ways."""
        catch_up, expected = self.listener.catch_up, self.listener.cursor.expected
        how = self.chance.choice(("same", "other", "forgotten", "empty", "silent"))
        new = self.chance.choice((0, 1, 3)) if how in ("same", "other", "empty") else 0
        if how == "other":
            self.start_engine()
            assert self.bring(ReplayEnd.MARKER, expected) is ReplayEnd.OTHER_ENGINE
            self.bring(ReplayEnd.MARKER, new)
        elif how == "empty":
            self.start_engine()
            assert self.bring(ReplayEnd.MARKER, 0) is ReplayEnd.OTHER_ENGINE
            self.bring(ReplayEnd.MARKER, new)
        elif how == "same":
            self.bring(ReplayEnd.MARKER, expected + new)
        else:
            catch_up.begin()
            later = how == "forgotten" and catch_up.take(expected + 2, b"later plain")
            catch_up.end(later or ReplayEnd.SILENT)
        self.happen("answer", how, new)

    def start_engine(self) -> None:
        self.engine += 1
        self.batches.clear()

    def bring(self, end: ReplayEnd, stop: int = 2**63) -> ReplayEnd:
        """Has a replay bring the wanted batches below the number `stop`, and end with `end`."""
        catch_up = self.listener.catch_up
        catch_up.begin()
        wanted = catch_up.wanted()
        for seq in range(wanted.start, min(wanted.stop, stop)):
            payload = self.batches.setdefault(seq, self.text(seq))
            if (over := catch_up.take(seq, payload)) is not None:
                return catch_up.end(over)
        return catch_up.end(end)

    def check(self) -> None:
        listener, history = self.listener, self.history
        assert listener.connected is stream_model.is_connected(history)
        assert listener.status == stream_model.status(history)
        asked = {"can_ask": self.can_ask}
        for moment in (self.now, self.now + stream_model.STALE_AFTER_S + 1):
            assert listener.health(moment) == stream_model.health(history, moment, **asked)
        assert listener.catch_up.asks is stream_model.asks(history, **asked)
        self.check_identity()

    def check_identity(self) -> None:
        """Checks what the docstring of `engine_identity` says about identity checks."""
        identity, is_held = self.listener.identity, self.listener.catch_up.held is not None
        assert is_held or identity.check not in OF_HELD
        assert not (is_held and identity.check in ASKED)
        is_confirming = identity.wants_held and not identity.wants_last
        assert not (is_confirming and identity.is_unknown)
        assert not (identity.is_unknown and self.listener.cursor.last is None)
        assert self.can_ask or (identity.check, identity.identity) == IN_PEACE


@pytest.mark.parametrize("seed", range(SEEDS))
def test_status_and_health_are_those_of_the_plain_model(seed: int) -> None:
    life = Life(seed)
    for _ in range(STEPS):
        life.step()
        life.check()
