"""Prompts of questions and events are counted, with the tokens that they begin with."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import msgpack

from kvd_core.index.prefix_index import IngestStats, PrefixIndex, PromptStats
from kvd_core.json.scan import BodyScanner
from kvd_core.ledger.ledger import Ledger
from kvd_core.selector.selector import Candidate, Pool
from kvd_core.selector.settings import Settings

SIZE = 4
SCANNER = BodyScanner({"token_ids": "u32"}, ())
KEPT = 16


class Index:
    """An index with one rank, in which prompts are stored and looked up."""

    def __init__(self) -> None:
        self.index = PrefixIndex(SIZE, IngestStats())
        self._stream = self.index.add_worker(1).stream(0)
        self._names = count(1)

    def store(self, tokens: list[int], **members: Any) -> None:
        names = [next(self._names) for _ in range(len(tokens) // SIZE)]
        event = {
            "type": "BlockStored",
            "block_hashes": names,
            "parent_block_hash": None,
            "token_ids": tokens,
            "block_size": SIZE,
            **members,
        }
        self._stream.apply(msgpack.packb([0.0, [event]]))

    def ask(self, tokens: list[int], *names: str | None) -> None:
        SCANNER.scan(json.dumps({"token_ids": tokens}).encode())
        self.index.query_tokens(SCANNER, 0, *names)


def prompt(first: int, blocks: int = 1) -> list[int]:
    return [first] * (SIZE * blocks)


def test_events_are_told_by_their_first_blocks() -> None:
    index = Index()
    index.store(prompt(7, 3))
    index.store(prompt(8), parent_block_hash=3)
    index.store(prompt(9), lora_name="french")
    index.store(prompt(10), lora_id=3)
    index.store(prompt(11), extra_keys=[["salt"]])
    index.store(prompt(12), extra_keys=[None])
    assert index.index.announced() == PromptStats(5, 1, 2, 2, [7, 9, 10, 11, 12])


def test_blocks_that_cannot_be_used_say_nothing() -> None:
    index = Index()
    index.store(prompt(7), block_size=2 * SIZE)
    index.store(prompt(7)[:-1])
    index.store([])
    assert index.index.announced() == PromptStats(0, 0, 0, 0, [])


def test_questions_count_while_there_are_blocks() -> None:
    index = Index()
    index.ask(prompt(1))
    index.store(prompt(7))
    index.ask(prompt(2))
    index.ask(prompt(3), "french")
    index.ask(prompt(4), None, "salt")
    index.ask(prompt(5), "french", "salt")
    index.ask(prompt(6), "", "")
    index.ask(prompt(6)[:-1])  # has no whole block
    assert index.index.asked() == PromptStats(5, 2, 2, 5, [2, 3, 4, 5, 6])
    assert index.index.questions == 5


def test_prompts_that_are_stored_after_they_were_asked_for_are_noticed() -> None:
    """However many questions there are, some from their middle are kept."""
    for number in (1, 2, 3, 5, 100, 1000):
        index = Index()
        index.store(prompt(7))
        for first in range(1000, 1000 + number):
            index.ask(prompt(first, 2))
        assert not index.index.stores_asked() and not index.index.matched
        for first in range(1000 + number // 3, 1001 + 2 * number // 3):
            index.store(prompt(first))
        assert index.index.stores_asked(), number


def test_the_last_tokens_are_kept() -> None:
    index = Index()
    for first in range(KEPT + 3):
        index.store(prompt(first))
    announced = index.index.announced()
    assert announced.prompts == KEPT + 3
    assert sorted(announced.first_tokens) == list(range(3, KEPT + 3))


def test_selections_count_as_they_are_answered() -> None:
    index = Index()
    index.store(prompt(7))
    ledger = Ledger()
    candidate = Candidate(1, 0, None, ledger.add_rank(1, 0))
    pool = Pool(index.index, ledger, SIZE, [candidate])

    def answer() -> None:
        pool.render_answer(b"{", b"", 0, Settings())

    for names in ((None, None), ("french", None), (None, "salt")):
        SCANNER.scan(json.dumps({"token_ids": prompt(9)}).encode())
        pool.match_tokens(SCANNER, 0, *names)
        answer()
    hold = pool.hold()
    pool.match(bytes(8), bytes(8), SIZE)  # by hash
    answer()
    pool.match_again(hold)
    answer()
    assert index.index.asked() == PromptStats(4, 2, 1, 4, [9, 9, 9, 9])
    assert index.index.questions == 5
