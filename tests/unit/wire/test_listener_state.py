"""The state of a listener's stream without sockets: batches, gaps, replays, restarts."""

from __future__ import annotations

import pytest

from kvd.wire.applied_batches import CLEARED_UNKNOWN, MAX_HOLES_SHOWN, UNKNOWN
from kvd.wire.cursor import Verdict
from kvd.wire.engine_identity import IdentityCheck
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import ReplayEnd, read_answer, request
from kvd.wire.stream_link import STALE_AFTER_S, ListenerStatus
from kvd.wire.stream_stats import StreamStats
from tests.support.batch_sinks import Applied

END_SEQ = (2**64 - 1).to_bytes(8)


def make(expected: int = 0, replay: bool = False) -> tuple[EventStream, Applied]:
    stream = Applied()
    replay_endpoint = "tcp://127.0.0.1:5558" if replay else None
    listener = EventStream("1:0", "tcp://127.0.0.1:5557", stream, replay_endpoint, expected)
    listener.connecting()
    listener.receiving()
    listener.joined()
    return listener, stream


def feed(listener: EventStream, *batches: tuple[int, bytes]) -> list[str]:
    """Feeds batches as the listener's task does when replays bring nothing; returns the losses."""
    lost = []
    for seq, payload in batches:
        if listener.take(seq, payload) and listener.catch_up.judge() is not Verdict.STALE:
            lost.append(listener.catch_up.apply_held())
    return lost


def replay(listener: EventStream, batch: bytes) -> ReplayEnd | None:
    """Replays all wanted batches until the replay ends; returns how it ended."""
    ends = (listener.catch_up.take(seq, batch % seq) for seq in listener.catch_up.wanted())
    return next(filter(None, ends), None)


def answer(listener: EventStream, seqs: list[int]) -> ReplayEnd:
    """Replays some batches in one answer with the end marker; returns how it ended."""
    listener.catch_up.begin()
    ends = (listener.catch_up.take(seq, b"%d" % seq) for seq in seqs)
    return next(filter(None, ends), ReplayEnd.MARKER)


def health(listener: EventStream, now: float = 0.0) -> str:
    return listener.health(now)


# ---- batches


def test_batches_are_applied_and_counted() -> None:
    listener, applied = make()
    batches = [(0, b"a"), (1, b"bc"), (1, b"bc"), (0, b"old"), (5, b"d"), (6, b"")]
    assert feed(listener, *batches) == ["2..4"]
    assert applied == [b"a", b"bc", b"d", b""]
    assert (listener.stats.messages, listener.stats.payload_bytes) == (6, 9)
    stats = listener.stats
    assert (stats.gaps, stats.lost, stats.stale, stats.replayed) == (1, 3, 2, 0)
    assert listener.cursor.last == 6


def test_a_gap_of_any_width_is_counted() -> None:
    listener, _ = make()
    assert feed(listener, (2**64 - 2, b"")) == ["0..18446744073709551613"]
    assert (listener.stats.gaps, listener.stats.lost) == (1, 2**64 - 2)


def test_a_batch_that_is_not_next_is_held_until_settled() -> None:
    listener, applied = make()
    assert listener.take(0, b"0") is False
    assert listener.take(3, b"3") is True
    assert listener.catch_up.judge() is Verdict.GAP
    catch_up = listener.catch_up
    assert (catch_up.held, catch_up.wanted(), applied) == ((3, b"3"), range(1, 3), [b"0"])
    assert listener.catch_up.take(1, b"1") is None
    assert listener.catch_up.take(2, b"2") is ReplayEnd.REACHED
    assert listener.catch_up.apply_held() == ""
    assert (listener.catch_up.held, applied) == (None, [b"0", b"1", b"2", b"3"])
    stats = listener.stats
    assert (stats.gaps, stats.replayed, stats.lost, health(listener)) == (1, 2, 0, "exact")


# ---- blocks of a peer's dump, before the engine has been heard


def test_the_number_0_says_that_the_engine_is_another_than_the_dump_knew() -> None:
    listener, applied = make()
    applied.dumped = True
    assert health(listener) == "recovering"
    assert feed(listener, (0, b"0"), (1, b"1")) == []
    assert (applied.dumped, applied, listener.stats.superseded) == (False, [b"0", b"1"], 1)
    assert (health(listener), listener.loss) == ("exact", "")


def test_a_number_0_that_goes_on_with_a_dump_is_no_beginning() -> None:
    listener, applied = make()
    applied.dumped = True
    assert feed(listener, (0, b"goes on")) == []
    assert (applied.dumped, applied, listener.stats.superseded) == (True, [b"goes on"], 0)
    assert (health(listener), listener.loss) == ("degraded", "restored from a peer")
    feed(listener, (2, b"2"))
    assert listener.loss == "missing 1, restored from a peer"


def test_a_history_from_0_takes_the_place_of_a_dump() -> None:
    listener, applied = make(replay=True)
    applied.dumped = True
    assert listener.take(2, b"2")
    listener.catch_up.judge()
    assert listener.catch_up.take(0, b"0") is None
    assert (applied.dumped, applied) == (False, [b"0"])
    listener.catch_up.take(1, b"1")
    assert listener.catch_up.apply_held() == ""
    assert (listener.stats.superseded, health(listener)) == (1, "exact")


def test_a_dump_is_kept_where_the_history_does_not_begin_at_0() -> None:
    listener, applied = make(replay=True)
    applied.dumped = True
    assert listener.take(5, b"5")
    listener.catch_up.judge()
    listener.catch_up.take(2, b"2")
    assert listener.catch_up.apply_held() == "0..1,3..4"
    assert (applied.dumped, listener.stats.superseded) == (True, 0)
    assert (health(listener), listener.loss) == (
        "degraded",
        "missing 0..1,3..4, restored from a peer",
    )
    feed(listener, (7, b"7"))
    assert listener.loss == "missing 6, restored from a peer"
    feed(listener, (8, b"emptied"), (10, b"10"))
    assert listener.loss == "missing 9"


# The batches that a replay of 1 .. 5 brings, those applied, those lost, and strays.
REPLAYS = {
    "all": ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], "", 0),
    "nothing": ([], [], "1..5", 0),
    "the buffer has wrapped": ([4, 5], [4, 5], "1..3", 0),
    "it ends early": ([1, 2], [1, 2], "3..5", 0),
    "holes": ([1, 3, 5], [1, 3, 5], "2,4", 0),
    "twice each": ([1, 1, 2, 2, 3, 3, 4, 4, 5], [1, 2, 3, 4, 5], "", 4),
    "from before": ([0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], "", 1),
    "reordered": ([2, 1, 4, 3, 5], [2, 4, 5], "1,3", 2),
    "downward": ([5, 4, 3, 2, 1], [5], "1..4", 0),
    "beyond": ([6], [], "1..5", 1),
    "far beyond": ([1, 2**64 - 2], [1], "2..5", 1),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_only_what_is_wanted_is_taken_from_a_replay(name: str) -> None:
    seqs, taken, lost, strays = REPLAYS[name]
    listener, applied = make()
    feed(listener, (0, b"0"))
    listener.take(6, b"6")
    listener.catch_up.judge()
    while listener.catch_up.wants_more(answer(listener, seqs)):
        seqs = [seq for seq in seqs if seq >= listener.catch_up.wanted().start]
    assert listener.catch_up.apply_held() == lost
    assert applied == [b"%d" % seq for seq in [0, *taken, 6]]
    assert (listener.stats.replayed, listener.stats.lost) == (len(taken), 5 - len(taken))
    assert listener.stats.strays == strays
    assert listener.loss == (f"missing {lost}" if lost else "")
    assert feed(listener, (7, b"7")) == []


def test_a_text_names_so_many_holes_only() -> None:
    listener, _ = make()
    last = 2 * (MAX_HOLES_SHOWN + 3)
    listener.take(last, b"")
    listener.catch_up.judge()
    for seq in range(1, last, 2):
        answer(listener, [seq])
    assert listener.catch_up.apply_held() == "0,2,4,6,8,10,12,14,..."
    assert listener.stats.lost == MAX_HOLES_SHOWN + 3


def test_a_restart_drops_what_was_applied() -> None:
    listener, applied = make()
    feed(listener, (0, b"a"), (1, b"b"), (7, b"c"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    assert feed(listener, (0, b"x"), (1, b"y")) == [""]
    assert (applied, listener.stats.restarts, listener.cursor.last) == ([b"x", b"y"], 1, 1)
    assert (health(listener), listener.loss) == ("exact", "")


def test_an_engine_that_has_come_as_far_is_told_by_its_replay() -> None:
    listener, applied = make(replay=True)
    feed(listener, (0, b"a"), (1, b"b"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    assert listener.take(2, b"z") is True  # the very number that was expected
    listener.catch_up.judge()
    # Its own number is wanted, too, as it may be an old batch that was queued.
    assert listener.catch_up.wanted() == range(1, 3)
    assert listener.catch_up.take(1, b"y") is ReplayEnd.OTHER_ENGINE
    assert (applied, listener.catch_up.wanted()) == ([], range(3))
    for seq, payload in enumerate((b"x", b"y", b"z")):
        end = listener.catch_up.take(seq, payload)
    assert (end, listener.catch_up.apply_held()) == (ReplayEnd.REACHED, "")
    assert (applied, listener.stats.restarts) == ([b"x", b"y", b"z"], 1)
    assert listener.take(3, b"") is False


def test_the_same_engine_is_told_by_its_replay_and_asked_once() -> None:
    listener, applied = make(replay=True)
    feed(listener, (0, b"a"), (1, b"b"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    listener.take(4, b"e")
    listener.catch_up.judge()
    assert listener.catch_up.wanted() == range(1, 5)
    for seq, payload in (1, b"b"), (2, b"c"), (3, b"d"), (4, b"e"):
        end = listener.catch_up.take(seq, payload)
    assert (end, listener.catch_up.apply_held()) == (ReplayEnd.REACHED, "")
    assert applied == [b"a", b"b", b"c", b"d", b"e"]
    assert (listener.stats.replayed, listener.stats.restarts) == (2, 0)
    assert listener.take(5, b"") is False


@pytest.mark.parametrize("heard", [2, 0])  # batches heard before the connection was lost
def test_batches_that_were_queued_when_another_engine_came_do_not_count(heard: int) -> None:
    listener, applied = make(replay=True)
    feed(listener, *((seq, b"old %d" % seq) for seq in range(heard)))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    for seq in (heard, heard + 1):  # the new engine has published these numbers, too
        assert listener.take(seq, b"old %d" % seq) is True
        listener.catch_up.judge()
        while replay(listener, b"new %d") is ReplayEnd.OTHER_ENGINE:
            pass
        listener.catch_up.apply_held()
    assert applied == [b"new %d" % seq for seq in range(heard + 2)]
    assert health(listener) == "exact"


def test_a_gap_before_a_known_loss_is_not_filled_by_another_engine() -> None:
    listener, applied = make(replay=True)
    feed(listener, (0, b"old 0"), (1, b"old 1"))
    listener.subscribe(lambda change: None)  # changes take effect behind the waiting batches
    listener.lost_connection("gone", 1.0)
    for seq in (3, 4):
        assert listener.take(seq, b"old %d" % seq) is True
        assert listener.catch_up.judge(lost=True) is not Verdict.STALE
        assert listener.catch_up.wanted() == range(1 if seq == 3 else 3, seq + 1)
        while replay(listener, b"new %d") is ReplayEnd.OTHER_ENGINE:
            pass
        listener.catch_up.apply_held()
    assert applied == [b"new %d" % seq for seq in range(5)]
    assert listener.stats.restarts == 1


def test_a_gap_before_a_known_loss_is_filled_by_the_same_engine() -> None:
    listener, applied = make(replay=True)
    feed(listener, (0, b"0"), (1, b"1"))
    listener.subscribe(lambda change: None)
    listener.lost_connection("gone", 1.0)
    listener.take(3, b"3")
    assert listener.catch_up.judge(lost=True) is Verdict.GAP
    assert replay(listener, b"%d") is ReplayEnd.REACHED
    assert listener.catch_up.apply_held() == ""
    assert (applied, health(listener)) == ([b"0", b"1", b"2", b"3"], "exact")
    assert listener.take(4, b"4") is False  # nothing is missing, so no replay is needed


def test_the_next_answer_behind_a_loss_is_not_taken_for_the_same_engines() -> None:
    listener, applied = make(replay=True)
    listener.take(4, b"old 4")
    listener.catch_up.judge()
    listener.catch_up.begin()
    assert [listener.catch_up.take(seq, b"old %d" % seq) for seq in (0, 1)] == [None, None]
    assert listener.catch_up.wants_more(ReplayEnd.SILENT)
    listener.subscribe(lambda change: None)  # changes take effect behind the held batch
    listener.lost_connection("gone", 1.0)
    assert listener.catch_up.take(2, b"new 2") is ReplayEnd.HOLE  # requested before the loss
    assert listener.catch_up.wants_more(ReplayEnd.HOLE)
    listener.catch_up.begin()
    assert listener.catch_up.wanted() == range(1, 5)
    while replay(listener, b"new %d") is ReplayEnd.OTHER_ENGINE:
        listener.catch_up.begin()
    assert listener.catch_up.apply_held() == ""
    assert applied == [b"new %d" % seq for seq in range(5)]
    assert listener.stats.restarts == 1


@pytest.mark.parametrize("batch_form", [b"new %d", b"%d"])
def test_an_idle_engine_proves_itself_anew_behind_a_loss(batch_form: bytes) -> None:
    listener, applied = make(replay=True)
    feed(listener, (0, b"0"), (1, b"1"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    listener.catch_up.ask()
    listener.catch_up.begin()
    assert [listener.catch_up.take(seq, b"%d" % seq) for seq in (1, 2)] == [None, None]
    listener.lost_connection("gone", 2.0)
    listener.catch_up.begin()
    assert listener.catch_up.wanted().start == 2
    is_other = listener.catch_up.take(2, batch_form % 2) is ReplayEnd.OTHER_ENGINE
    assert (is_other, applied) == (
        (False, [b"0", b"1", b"2"]) if batch_form == b"%d" else (True, [])
    )
    listener.catch_up.begin()
    assert listener.catch_up.wanted().start == (0 if is_other else 2)
    listener.joined()
    listener.catch_up.end(ReplayEnd.SILENT)
    # The engine that has answered may differ from the one connected now.
    assert listener.identity.check is IdentityCheck.DUE


def test_a_batch_that_no_replay_confirms_degrades() -> None:
    listener, _ = make(replay=True)
    listener.lost_connection("gone", 1.0)
    listener.joined()
    listener.take(5, b"old")
    listener.catch_up.judge()
    for seq in range(3):
        listener.catch_up.take(seq, b"new")
    listener.catch_up.end(ReplayEnd.MARKER)
    listener.catch_up.apply_held()
    assert health(listener) == "degraded"
    feed(listener, (3, b"new"))
    assert listener.stats.restarts == 1
    assert health(listener) == "degraded"  # 0..2 of the new engine are missing


def test_what_a_failed_socket_left_unproved_is_asked_again() -> None:
    listener, _ = make(replay=True)
    feed(listener, (0, b"a"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    listener.take(1, b"b")
    listener.catch_up.judge()
    listener.failed("gone for good", 2.0)
    listener.connecting()
    listener.joined()
    assert listener.take(1, b"b") is True
    listener.catch_up.judge()
    assert listener.catch_up.wanted() == range(2)


@pytest.mark.parametrize("seqs", [[], [2, 3]])
def test_an_answer_without_the_proof_degrades(seqs: list[int]) -> None:
    listener, applied = make(replay=True)
    feed(listener, (0, b"0"), (1, b"1"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    listener.take(2 + len(seqs), b"last")
    listener.catch_up.judge()
    for seq in seqs:
        listener.catch_up.take(seq, b"%d" % seq)
    listener.catch_up.end(ReplayEnd.REACHED if seqs else ReplayEnd.MARKER)
    assert listener.catch_up.apply_held() == ""
    assert listener.loss == UNKNOWN
    assert applied == [b"0", b"1", *(b"%d" % seq for seq in seqs), b"last"]


def forget_the_engine() -> tuple[EventStream, Applied]:
    """Returns a listener with two batches, reconnected, whose replay server has forgotten them."""
    listener, applied = make(replay=True)
    feed(listener, (0, b"0"), (1, b"1"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    listener.take(2, b"2")
    listener.catch_up.judge()
    assert listener.catch_up.take(7, b"7") is ReplayEnd.REACHED
    listener.catch_up.end(ReplayEnd.REACHED)
    listener.catch_up.apply_held()
    return listener, applied


def test_a_clear_of_an_engine_that_is_not_known_ends_a_loss_once_it_is() -> None:
    listener, _ = forget_the_engine()
    feed(listener, (3, b"emptied"))
    assert listener.loss == CLEARED_UNKNOWN
    assert listener.take(4, b"4") is True
    listener.catch_up.judge()
    assert (listener.catch_up.wanted(), listener.loss) == (range(3, 5), CLEARED_UNKNOWN)
    for seq, payload in (3, b"emptied"), (4, b"4"):
        end = listener.catch_up.take(seq, payload)
    assert (end, listener.catch_up.apply_held()) == (ReplayEnd.REACHED, "")
    assert health(listener) == "exact"
    feed(listener, (5, b"5"), (8, b"8"), (9, b"emptied"))
    assert health(listener) == "exact"


def test_a_clear_is_doubted_where_no_replay_has_answered() -> None:
    listener, _ = make(replay=True)
    listener.lost_connection("gone", 1.0)
    listener.joined()
    feed(listener, (3, b"3"))  # its replay brings nothing
    assert listener.loss == "missing 0..2"
    feed(listener, (4, b"emptied"))
    assert listener.loss == CLEARED_UNKNOWN
    feed(listener, (5, b"5"))  # nor does this one's
    assert (health(listener), listener.take(6, b"6")) == ("degraded", False)


def test_a_clear_costs_an_exact_stream_nothing_where_no_replay_answers() -> None:
    listener, _ = make(replay=True)
    feed(listener, (0, b"0"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    feed(listener, (1, b"1"), (2, b"emptied"))
    assert (health(listener), listener.take(3, b"3")) == ("exact", False)


def test_an_engine_that_is_not_known_is_asked_again_with_the_next_gap() -> None:
    listener, applied = forget_the_engine()
    assert listener.take(3, b"3") is False
    listener.take(5, b"5")
    listener.catch_up.judge()
    assert listener.catch_up.wanted() == range(3, 6)
    assert listener.catch_up.take(3, b"other") is ReplayEnd.OTHER_ENGINE
    assert (applied, listener.stats.restarts) == ([], 1)


def test_a_late_duplicate_does_not_take_the_place_of_the_first_batch() -> None:
    listener, _ = make(replay=True)
    feed(listener, (0, b"0"), (1, b"1"))
    listener.lost_connection("gone", 1.0)
    listener.joined()
    feed(listener, (1, b"1"))
    assert (listener.stats.stale, listener.take(2, b"2")) == (1, True)
    listener.catch_up.judge()
    assert listener.catch_up.wanted() == range(1, 3)


def test_a_queued_clear_does_not_make_the_next_engine_exact() -> None:
    listener, applied = forget_the_engine()
    feed(listener, (3, b"emptied"))
    assert listener.take(4, b"old, too") is True
    listener.catch_up.judge()
    listener.catch_up.take(7, b"7")
    listener.catch_up.end(ReplayEnd.REACHED)
    listener.catch_up.apply_held()
    feed(listener, (5, b"the new engine's, by chance the next number"))
    assert len(applied) == 6
    assert (health(listener), listener.loss) == ("degraded", UNKNOWN)


def test_a_clear_by_another_engine_is_a_restart() -> None:
    listener, applied = forget_the_engine()
    feed(listener, (3, b"emptied"))
    listener.take(4, b"4")
    listener.catch_up.judge()
    assert listener.catch_up.take(3, b"other") is ReplayEnd.OTHER_ENGINE
    assert (applied, listener.stats.restarts, listener.loss) == ([], 1, "")


def test_a_connection_lost_during_a_replay_is_asked_about_next_time() -> None:
    listener, _ = make(replay=True)
    feed(listener, (0, b"a"))
    listener.take(2, b"c")
    listener.catch_up.judge()
    listener.lost_connection("gone", 1.0)
    listener.joined()
    assert listener.catch_up.wanted() == range(1, 2)
    listener.catch_up.apply_held()
    assert listener.take(3, b"d") is True


def test_batches_of_the_last_engine_are_not_replayed_into_the_next() -> None:
    listener, applied = make(replay=True)
    feed(listener, *((seq, b"old %d" % seq) for seq in range(10)))
    listener.joined()
    listener.take(3, b"new 3")
    assert listener.catch_up.judge() is Verdict.RESTART
    for seq, payload in (0, b"old 0"), (1, b"old 1"), (2, b"new 2"):
        listener.catch_up.take(seq, payload)
    assert listener.catch_up.apply_held() == "0..1"
    assert (applied, listener.stats.strays) == ([b"new 2", b"new 3"], 2)


def test_refused_messages_are_counted_by_reason() -> None:
    listener, _ = make()
    listener.take(0, b"")
    for reason in ("frame_count", "sequence_length", "frame_count"):
        listener.refuse(reason)
    assert listener.stats.bad_frames == {"frame_count": 2, "sequence_length": 1}
    assert (listener.stats.refused, listener.stats.messages, listener.cursor.last) == (3, 1, 0)


def test_counts_add_up() -> None:
    total = StreamStats(bad_frames={"a": 1})
    total.messages = 1
    listener, _ = make()
    feed(listener, (0, b"abc"))
    listener.refuse("a")
    listener.refuse("b")
    total.add(listener.stats)
    assert (total.messages, total.payload_bytes, total.joins) == (2, 3, 1)
    assert total.bad_frames == {"a": 2, "b": 1}


# ---- health


def test_before_the_first_batch_nothing_is_known() -> None:
    listener, _ = make()
    assert health(listener) == "recovering"
    feed(listener, (0, b""))
    assert health(listener) == "exact"


def test_a_gap_recovers_and_degrades() -> None:
    listener, _ = make()
    feed(listener, (0, b""))
    listener.take(3, b"")
    listener.catch_up.judge()
    assert health(listener) == "recovering"
    listener.catch_up.apply_held()
    assert (health(listener), listener.loss) == ("degraded", "missing 1..2")


def test_a_batch_that_is_not_understood_is_lost() -> None:
    listener, _ = make()
    feed(listener, (0, b""), (1, b"flawed"), (2, b""))
    assert (health(listener), listener.loss) == ("degraded", "batch 1 could not be decoded")
    assert listener.stats.flawed == 1
    feed(listener, (3, b"emptied"))  # ends the loss, but the last flaw is still shown
    assert (listener.loss, listener.batches.last_flaw) == ("", (1, "truncated"))


def test_an_all_clear_ends_a_loss() -> None:
    listener, _ = make()
    feed(listener, (1, b""), (2, b"flawed"), (3, b"emptied"))
    assert (health(listener), listener.loss) == ("exact", "")
    feed(listener, (9, b"emptied"))  # a clear behind a gap ends that loss, too
    assert health(listener) == "exact"
    feed(listener, (10, b"both"))
    assert health(listener) == "degraded"


def test_an_engine_started_again_before_its_first_batch_was_taken() -> None:
    listener, applied = make()
    listener.lost_connection("gone", 1.0)
    listener.joined()
    feed(listener, (100, b"old, queued since"), (42, b"new"))
    assert (listener.stats.restarts, applied) == (1, [b"new"])


def test_a_worker_registered_again_has_lost_what_it_had() -> None:
    listener, applied = make(expected=5)
    assert (health(listener), listener.cursor.last) == ("degraded", 4)
    feed(listener, (5, b"a"))
    assert (health(listener), listener.loss, applied) == ("degraded", "registered again", [b"a"])
    feed(listener, (0, b"b"))  # the engine has restarted meanwhile
    assert (health(listener), applied) == ("exact", [b"b"])


def test_after_a_lost_connection_the_next_batch_tells() -> None:
    listener, _ = make()
    feed(listener, (0, b""))
    listener.lost_connection("gone", 1.0)
    assert health(listener, 1.0 + STALE_AFTER_S) == "exact"
    assert health(listener, 1.1 + STALE_AFTER_S) == "stale"
    listener.joined()
    assert health(listener, 100.0) == "recovering"
    feed(listener, (1, b""))
    assert health(listener, 100.0) == "exact"


# ---- status


def test_active_needs_a_worker_and_an_open_gate() -> None:
    listener = EventStream("1:0", "tcp://127.0.0.1:5557", Applied())
    assert listener.status is ListenerStatus.PENDING
    listener.connecting()
    listener.joined()
    assert listener.status is ListenerStatus.PENDING
    listener.receiving()
    assert listener.status is ListenerStatus.ACTIVE


def test_a_lost_connection_is_remembered_but_stays_active() -> None:
    listener = EventStream("1:0", "tcp://127.0.0.1:5557", Applied())
    listener.connecting()
    listener.receiving()
    listener.lost_connection("handshake failed", 1.0)
    assert (listener.status, listener.link.last_error) == ("pending", "handshake failed")
    assert (listener.stats.losses, listener.link.disconnected_since) == (0, None)
    listener.joined()
    assert (listener.connected, listener.link.last_error) == (True, None)
    listener.lost_connection("connection lost", 2.0)
    listener.lost_connection("handshake failed", 3.0)
    assert listener.status is ListenerStatus.ACTIVE
    assert (listener.connected, listener.stats.losses) == (False, 1)
    assert listener.link.disconnected_since == 2.0
    assert listener.link.last_error == "handshake failed"
    listener.joined()
    assert listener.stats.joins == 2
    assert (listener.link.disconnected_since, listener.link.last_error) == (None, None)


def test_failed_is_over_with_the_next_socket() -> None:
    listener, _ = make()
    listener.take(3, b"")
    listener.failed("protocol error", 4.0)
    assert (listener.status, listener.stats.failures, listener.stats.losses) == ("failed", 1, 1)
    assert (listener.link.disconnected_since, listener.catch_up.held) == (4.0, None)
    listener.connecting()
    assert (listener.status, listener.link.last_error) == ("pending", "protocol error")
    listener.joined()
    listener.receiving()
    assert (listener.status, listener.link.last_error) == ("active", None)


def test_paused_keeps_the_place_and_goes_stale() -> None:
    listener, applied = make()
    feed(listener, (0, b"a"))
    listener.take(2, b"c")
    listener.paused(5.0)
    assert (listener.status, listener.catch_up.held, listener.stats.losses) == ("paused", None, 0)
    assert health(listener, 6.0 + STALE_AFTER_S) == "stale"
    listener.connecting()
    listener.joined()
    listener.receiving()
    assert (listener.status, health(listener)) == ("active", "recovering")
    feed(listener, (1, b"b"))
    assert (applied, health(listener)) == ([b"a", b"b"], "exact")


# ---- the replay protocol

ANSWERS = {
    "3 frames": ([b"", (7).to_bytes(8), b"p"], (7, b"p", b"")),
    "4 frames": ([b"", b"topic", (7).to_bytes(8), b"p"], (7, b"p", b"")),
    "end, 3 frames": ([b"", END_SEQ, b""], (2**64 - 1, b"", b"")),
    "end, 4 frames": ([b"", b"", END_SEQ, b""], (2**64 - 1, b"", b"")),
    "no frame": ([], None),
    "one": ([b""], None),
    "no delimiter": ([(7).to_bytes(8), b"p"], None),
    "a delimiter that is none": ([b"x", (7).to_bytes(8), b"p"], None),
    "a short number": ([b"", (7).to_bytes(4), b"p"], None),
    "a long number": ([b"", (7).to_bytes(9), b"p"], None),
    "5 frames": ([b"", b"", b"", (7).to_bytes(8), b"p"], None),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    frames, answer = ANSWERS[name]
    assert read_answer(frames) == answer


def test_request() -> None:
    assert request(258) == [b"", b"\0\0\0\0\0\0\1\2"]
