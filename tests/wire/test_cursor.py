from __future__ import annotations

import pytest

from kvd.wire.cursor import Cursor, Verdict

LAST_SEQ = 2**64 - 1

# accepted before, seq, verdict, missing
JUDGEMENTS = [
    ([], 0, Verdict.FIRST, range(0)),
    ([], 1, Verdict.GAP, range(1)),
    ([], 57, Verdict.GAP, range(57)),
    ([0], 1, Verdict.NEXT, range(0)),
    ([0], 0, Verdict.STALE, range(0)),
    ([0], 2, Verdict.GAP, range(1, 2)),
    ([0, 1, 2], 3, Verdict.NEXT, range(0)),
    ([0, 1, 2], 9, Verdict.GAP, range(3, 9)),
    ([0, 1, 2], 2, Verdict.STALE, range(0)),
    ([0, 1, 2], 0, Verdict.STALE, range(0)),
    ([57], 58, Verdict.NEXT, range(0)),
    ([57], 56, Verdict.STALE, range(0)),
    ([], LAST_SEQ, Verdict.GAP, range(LAST_SEQ)),
    ([LAST_SEQ], LAST_SEQ, Verdict.STALE, range(0)),
]


@pytest.mark.parametrize(("accepted", "seq", "verdict", "missing"), JUDGEMENTS)
def test_judgement(accepted: list[int], seq: int, verdict: Verdict, missing: range) -> None:
    cursor = Cursor()
    for number in accepted:
        cursor.accept(number)
    assert cursor.observe(seq) is verdict
    assert cursor.missing(seq) == missing


def test_judging_changes_nothing() -> None:
    cursor = Cursor()
    for seq in (5, 0, 5):
        cursor.observe(seq)
    assert cursor.last is None
    cursor.accept(7)
    assert (cursor.last, cursor.observe(9), cursor.last) == (7, Verdict.GAP, 7)


def test_a_gap_that_was_filled_is_judged_again() -> None:
    cursor = Cursor()
    cursor.accept(0)
    assert cursor.missing(3) == range(1, 3)
    for seq in cursor.missing(3):
        cursor.accept(seq)
    assert cursor.observe(3) is Verdict.NEXT
