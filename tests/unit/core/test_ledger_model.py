"""Long random lives of ledgers, compared step by step with the plain-Python model.

Several ledgers share their loads: they have some ranks in common, and use the same ids for
different requests.
"""

from __future__ import annotations

import random

import pytest

from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings
from tests.support.budget import scaled
from tests.support.ledger_lives import Pair


def compare_decoding(pair: Pair) -> None:
    for _ in pair.each_side():
        places = sorted(pair.model.ranks)
        ranks = [Candidate(*place, None, pair.id_of(place)) for place in places]
        pool = Pool(None, pair.ledger, 1, ranks)
        pool.match(b"", b"", 0)
        decoding = [row.decoding_requests for row in pool.explain(Settings())]
        assert decoding == [pair.model.decoding(place) for place in places]


def live(pair: Pair, steps: int) -> None:
    for _ in range(steps):
        pair.step()
        pair.ledger.verify()
        pair.compare()
        compare_decoding(pair)
    pair.compare_requests()
    pair.end()


@pytest.mark.parametrize("seed", range(scaled(5)))
def test_ledger_equals_model(seed: int) -> None:
    pair = Pair(random.Random(seed), ranks=(1, 3, 12, 40)[seed % 4], owners=1 + seed // 4 % 3)
    live(pair, 250)


@pytest.mark.slow("the model walks each block")
@pytest.mark.parametrize("seed", range(scaled(1)))
def test_ledger_equals_model_on_long_prompts(seed: int) -> None:
    pair = Pair(random.Random(seed), ranks=3, owners=1 + seed % 2, stretch=2500)
    live(pair, 60)
