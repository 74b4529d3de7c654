"""Speeds learned from simulated engines: they converge, and stay right despite disturbances."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from kvd.model import PartitionKey
from kvd.selection.regret import Account, Regret
from kvd.selection.speeds import CONFIDENT, ENOUGH, FADES_S, WINDOW, Line
from kvd_core.base.sampling import Sample

BASE_S, TOKEN_S = 0.03, 1 / 8000


def observations(random: Random, token_s: float = TOKEN_S, noise: float = 0.05) -> Iterator:
    """Yields tokens and seconds of an engine with a base time, a speed and some noise."""
    while True:
        tokens = random.randint(200, 20_000)
        exact = BASE_S + token_s * tokens
        yield tokens, exact * random.uniform(1 - noise, 1 + noise)


def learned(line: Line, source: Iterator, count: int, at: float = 0.0) -> None:
    for _, (tokens, seconds) in zip(range(count), source, strict=False):
        line.add(tokens, seconds, at)


def check_speed(line: Line, token_s: float, within: float = 0.1, at: float = 0.0) -> None:
    found = line.estimate(at)
    assert found is not None
    assert found.slope == pytest.approx(token_s, rel=within)
    assert found.confidence >= CONFIDENT


@pytest.mark.parametrize("seed", range(5))
def test_a_line_converges(seed: int) -> None:
    line = Line()
    learned(line, observations(Random(seed)), WINDOW)
    check_speed(line, TOKEN_S)
    found = line.estimate(0.0)
    assert found is not None
    assert found.base == pytest.approx(BASE_S, abs=0.1)
    assert found.observations == WINDOW


@pytest.mark.parametrize("seed", range(5))
def test_outliers_change_little(seed: int) -> None:
    """A fifth of the requests stalls for many seconds, or is reported complete too early."""
    random, line = Random(seed), Line()
    for _, (tokens, seconds) in zip(range(WINDOW), observations(random), strict=False):
        stalled = random.choice([seconds + 30.0, seconds * 0.01])
        line.add(tokens, stalled if random.random() < 0.2 else seconds, 0.0)
    check_speed(line, TOKEN_S, within=0.2)


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_an_engine_that_is_another_one_is_learned_anew(factor: float) -> None:
    line, random = Line(), Random(7)
    learned(line, observations(random), WINDOW)
    check_speed(line, TOKEN_S)
    learned(line, observations(random, TOKEN_S * factor), ENOUGH)
    check_speed(line, TOKEN_S * factor, within=0.15)


def test_confidence_grows_with_observations_and_fades() -> None:
    line = Line()
    source = observations(Random(1))
    assert line.estimate(0.0) is None
    learned(line, source, 1)
    assert line.estimate(0.0) is None  # one point does not determine a line
    learned(line, source, 3)
    few = line.estimate(0.0)
    assert few is None or few.confidence < CONFIDENT
    learned(line, source, WINDOW, at=100.0)
    check_speed(line, TOKEN_S, at=100.0)
    faded = line.estimate(100.0 + 3 * FADES_S)
    assert faded is not None and faded.confidence < CONFIDENT
    learned(line, source, 1, at=100.0 + 3 * FADES_S)
    check_speed(line, TOKEN_S, at=100.0 + 3 * FADES_S)


def test_prompts_of_one_length_tell_their_time_alone() -> None:
    line = Line()
    for _ in range(WINDOW):
        line.add(1000, 0.5, 0.0)
    found = line.estimate(0.0)
    assert found is not None
    assert (found.base, found.slope) == (0.0, 0.0005)


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(0, 1.0)] * WINDOW,
        [(5, 0.0)] * WINDOW,
        [(5, -1.0)] * WINDOW,
        [(100 * n, 100.0 / n) for n in range(1, WINDOW)],  # more tokens take less time
    ],
)
def test_nothing_is_said_of_what_makes_no_line(points: list[tuple[float, float]]) -> None:
    line = Line()
    for x, seconds in points:
        line.add(x, seconds, 0.0)
    assert line.estimate(0.0) is None


def test_noise_alone_is_not_believed() -> None:
    random, line = Random(3), Line()
    for _ in range(WINDOW):
        line.add(random.randint(1, 1000), random.expovariate(1.0) ** 3 + 1e-6, 0.0)
    found = line.estimate(0.0)
    assert found is None or found.confidence < CONFIDENT


def test_a_sample_takes_all_of_few_and_some_of_many() -> None:
    sample = Sample(100)
    for _ in range(5):
        taken = [number for number in range(50) if sample.takes(f"r{number}")]
        assert len(taken) == 50
        for _ in taken:
            sample.count()
        sample.adjust(1.0)
    assert sample.mask == 0
    observed = 0
    for number in range(100_000):  # within a second
        if sample.takes(f"r{number}"):
            sample.count()
            observed += 1
    assert 100 < observed < 2000
    for _ in range(20):
        sample.adjust(1.0)
    assert sample.mask == 0
    sample.take_all()
    for _ in range(10_000):
        sample.count()
    assert all(sample.takes(f"r{number}") for number in range(100))


def test_regret_counts_both_signs_apart() -> None:
    regret, rank = Regret(), (PartitionKey("m", "t"), 1, 0)
    for expected, cached in ((100, 80), (0, 50), (64, 64)):
        regret.note_cached(rank, expected, cached)
    for expected_s, took_s in ((1.0, 1.0), (1.0, 2.0), (None, 5.0), (1.0, 0.0)):
        regret.note_ttft(rank, expected_s, took_s)
    account = regret.accounts[rank]
    assert (account.reports, account.missing_tokens, account.surplus_tokens) == (3, 20, 50)
    assert (account.timed, account.expected_ttft_s, account.ttft_s) == (2, 2.0, 3.0)
    assert (account.error_at(0.5), account.error_at(0.9)) == (0.05, 0.5)
    both = Account()
    both.add(account)
    both.add(account)
    assert (both.reports, both.timed, sum(both.errors)) == (6, 4, 4)
