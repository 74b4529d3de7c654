"""A cursor judges the number of each batch: next, behind a gap, old, or of another engine."""

from __future__ import annotations

import random

import pytest

from kvd.wire.cursor import SIZE, Cursor, Verdict

LAST_SEQ = 2**64 - 1


def batch(seq: int, engine: str = "old") -> bytes:
    return f"{engine} {seq}".encode()


def accept(cursor: Cursor, seq: int, payload: bytes) -> None:
    """Moves a cursor behind a batch, as the stream does that applies it."""
    if seq != cursor.expected:
        cursor.skip_to(seq)
    cursor.recent.note(seq, payload)


def at(seqs: range | list[int], *, rejoined: bool = False) -> Cursor:
    """Returns a cursor that has accepted these numbers."""
    cursor = Cursor()
    for seq in seqs:
        accept(cursor, seq, batch(seq))
    if rejoined:
        cursor.rejoined()
    return cursor


def play(cursor: Cursor, *batches: tuple[int, str]) -> list[str]:
    """Judges batches one after the other, as a listener does; returns the verdicts."""
    verdicts = []
    for seq, engine in batches:
        verdict = cursor.judge(seq, batch(seq, engine))
        verdicts.append(verdict.value)
        if verdict is Verdict.RESTART:
            cursor.restart()
        if verdict is not Verdict.STALE:
            accept(cursor, seq, batch(seq, engine))
    return verdicts


def old(*seqs: int) -> list[tuple[int, str]]:
    return [(seq, "old") for seq in seqs]


def new(*seqs: int) -> list[tuple[int, str]]:
    return [(seq, "new") for seq in seqs]


# accepted before, seq, verdict
FORWARD = [
    ([], 0, "next"),
    ([], 1, "gap"),
    ([], 57, "gap"),
    ([0], 1, "next"),
    ([0], 2, "gap"),
    ([0, 1, 2], 3, "next"),
    ([0, 1, 2], 9, "gap"),
    ([57], 58, "next"),
    ([], LAST_SEQ, "gap"),
]


@pytest.mark.parametrize(("accepted", "seq", "verdict"), FORWARD)
def test_forward(accepted: list[int], seq: int, verdict: str) -> None:
    assert play(at(accepted), (seq, "old")) == [verdict]


STALE, RESTART, NEXT, GAP = "stale", "restart", "next", "gap"

# Name: numbers accepted before, batches, verdicts; all over one connection.
ONE_CONNECTION = {
    "a late duplicate": (range(60), old(40), [STALE]),
    "the duplicate of number 0": (range(60), old(0), [STALE]),
    "duplicates of everything": (range(60), old(*range(60)), [STALE] * 60),
    "duplicates and then the next": (range(3), old(0, 1, 2, 3), [STALE] * 3 + [NEXT]),
    "a late number": ([0, 1, 5], old(3), [STALE]),
    "late numbers in a row": ([0, 1, 9], old(2, 3, 4, 5, 6, 7, 8, 10), [STALE] * 7 + [NEXT]),
    "late numbers of several gaps": ([0, 5, 9], old(2, 3, 4, 6, 7, 8), [STALE] * 6),
    "late numbers of long ago": ([0, 1, 500], old(2, 3, 501), [STALE] * 2 + [NEXT]),
    "duplicates of long ago": (range(500), old(9, 10, 20, 21, 30), [STALE] * 5),
    "contradicting numbers downward": (range(2), new(1, 0), [STALE, STALE]),
    "a contradicting 0 alone": (range(60), [*new(0), *old(60)], [STALE, NEXT]),
    "contradictions with others between": (range(60), [*new(0), *old(60), *new(1)], None),
    "contradictions with a duplicate between": (range(60), [*new(0), *old(9), *new(1)], None),
    "0 and 1 contradict": (range(59), new(0, 1), [STALE, RESTART]),
    "0 and 1 of long ago contradict": (range(900), new(0, 1), [STALE, RESTART]),
    "the first is missed": (range(59), new(1, 2), [STALE, RESTART]),
    "three contradict": (range(59), new(5, 6, 7, 8), [STALE, STALE, RESTART, NEXT]),
    "three, not one by one": (range(59), new(5, 7, 9), [STALE] * 3),
    "a restart that begins alike": (range(3), [*old(0), *new(1, 2)], [STALE, STALE, RESTART]),
    "after it all goes on": (range(59), new(0, 1, 2, 4), [STALE, RESTART, NEXT, GAP]),
}


@pytest.mark.parametrize("name", ONE_CONNECTION)
def test_over_one_connection(name: str) -> None:
    accepted, batches, verdicts = ONE_CONNECTION[name]
    seen = play(at(accepted), *batches)
    if verdicts is None:
        assert RESTART not in seen
    else:
        assert seen == verdicts


ANOTHER_CONNECTION = {
    "it goes on": (range(60), old(60, 61), [NEXT, NEXT]),
    "it goes on behind a gap": (range(60), old(70), [GAP]),
    "a duplicate": (range(60), old(59, 58, 60), [STALE, STALE, NEXT]),
    "number 0": (range(60), new(0, 1), [RESTART, NEXT]),
    "a low number": (range(60), new(7, 8), [RESTART, NEXT]),
    "a low number of long ago": (range(900), new(7), [RESTART]),
    "a number that was skipped": ([0, 1, 9], new(5), [RESTART]),
    "the last number again": (range(60), new(59), [RESTART]),
    "what waited still, then number 0": (range(60), [*old(60, 61, 62), *new(0)], None),
}


@pytest.mark.parametrize("name", ANOTHER_CONNECTION)
def test_over_another_connection(name: str) -> None:
    accepted, batches, verdicts = ANOTHER_CONNECTION[name]
    seen = play(at(accepted, rejoined=True), *batches)
    assert seen == verdicts if verdicts is not None else seen[-1] == RESTART


def test_the_doubt_of_a_new_connection_ends() -> None:
    cursor = at(range(10), rejoined=True)
    assert set(play(cursor, *old(*range(10, 10 + SIZE)))) == {NEXT}
    assert play(cursor, *new(5)) == [STALE]


def test_the_doubt_of_a_new_connection_outlasts_a_gap() -> None:
    cursor = at(range(10), rejoined=True)
    accept(cursor, 10 + 2 * SIZE, b"behind a gap")
    assert play(cursor, *new(5)) == [RESTART]


def test_a_first_connection_is_above_doubt() -> None:
    assert play(Cursor(), *old(0, 1), *new(0)) == [NEXT, NEXT, STALE]


def test_a_second_connection_before_the_first_batch_is_not() -> None:
    cursor = Cursor()
    cursor.rejoined()
    assert play(cursor, *old(0, 1), *new(0)) == [NEXT, NEXT, RESTART]


def test_where_another_cursor_left_off() -> None:
    cursor = Cursor(expected=60)
    assert (cursor.last, Cursor().last) == (59, None)
    assert play(cursor, *old(60)) == [NEXT]
    assert play(cursor, *new(0)) == [RESTART]
    assert cursor.last == 0


def test_only_what_was_accepted_is_held() -> None:
    cursor = at(range(SIZE + 5))
    assert cursor.holds(SIZE, batch(SIZE)) and not cursor.holds(SIZE, batch(SIZE, "new"))
    assert not cursor.holds(0, batch(0))  # forgotten after SIZE further numbers
    assert not cursor.holds(SIZE + 5, batch(SIZE + 5))


@pytest.mark.parametrize("seed", range(20))
def test_no_disorder_of_one_engine_is_a_restart(seed: int) -> None:
    """Batches arrive twice or out of order, within the range of the last batches."""
    chance = random.Random(seed)
    cursor = Cursor()
    arriving = sorted(range(2000), key=lambda seq: seq + chance.random() * 40)
    arriving = [seq for seq in arriving for _ in range(chance.choice((1, 1, 2)))]
    for seq in arriving:
        (verdict,) = play(cursor, *old(seq))
        assert verdict != RESTART and not cursor.suspects_another


def test_a_batch_of_another_engine_is_suspected_until_the_next_one_is_judged() -> None:
    cursor = at(range(60))
    for batches, suspected in ((new(59), True), (old(59), False), (new(0), True)):
        assert (play(cursor, *batches), cursor.suspects_another) == ([STALE], suspected)
    assert (play(cursor, *new(1)), cursor.suspects_another) == ([RESTART], False)


@pytest.mark.parametrize("seed", range(20))
def test_every_restart_behind_a_proxy_is_seen(seed: int) -> None:
    """Single batches are lost, and no lost connection shows the restart."""
    chance = random.Random(seed)
    cursor = at(range(chance.randrange(10, 3000)))
    arriving = [seq for seq in range(100) if chance.random() > 0.2]
    assert RESTART in play(cursor, *new(*arriving))
