"""Ledgers and the plain-Python model of them, driven alike by random operations."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from kvd_core.ledger.ledger import Ledger, Loads
from tests.models.ledger_model import ModelLedger, ModelLoads
from tests.support.hashes import packed

VOCABULARY = 2  # hashes: few, so that prompts share prefixes and branch often
FRACTIONS = (0.0, 0.1, 0.25, 0.3, 0.5, 0.7, 1.0)


class Pair:
    """Ledgers that share loads, and their models; each operation is of one owner's ledger."""

    def __init__(self, rng: random.Random, ranks: int, owners: int, stretch: int = 1) -> None:
        self.rng = rng
        self.stretch = stretch  # how many times longer some prompts are
        loads, modelled = Loads(), ModelLoads()
        self.sides = [(self.made(loads), ModelLedger(modelled)) for _ in range(owners)]
        self.ledger, self.model = self.sides[0]
        self.places = [(rng.choice((1, 9, 2**64 - 1)), i) for i in range(ranks)]
        self.now = 0.0
        self.past: list[tuple[str, tuple[int, int], list[int], int, str | None]] = []

    def made(self, loads: Loads) -> Ledger:
        return Ledger(loads=loads)

    def each_side(self) -> Iterator[None]:
        """Makes one owner after the other the one whose ledger and model are used."""
        for side in self.sides:
            self.ledger, self.model = side
            yield

    def rank(self) -> tuple[int, int]:
        place = self.rng.choice(self.places)
        if place not in self.model.ranks:
            count = self.rng.choice((1, 1, 2, 5))
            if count == 1:
                self.ledger.add_rank(*place)
            else:
                self.ledger.add_ranks(*place, count)
            for beside in range(count):
                self.model.add_rank((place[0], place[1] + beside))
        return place

    def id_of(self, place: tuple[int, int]) -> int:
        rank = self.ledger.rank_of(*place)
        assert rank is not None
        return rank

    def prompt(self) -> list[int]:
        """Returns a prompt: mostly a prefix of an earlier one, and something new behind it."""
        hashes: list[int] = []
        if self.past and self.rng.random() < 0.6:
            hashes = list(self.rng.choice(self.past)[2])
            hashes = hashes[: self.rng.randrange(len(hashes) + 1)]
        for _ in range(self.rng.choice((0, 0, 1, 2, 5))):
            hashes += [self.rng.randrange(VOCABULARY)] * self.rng.choice((1, self.stretch))
        return hashes

    def name(self) -> str:
        return self.rng.choice(("", "r", "é", "\0", "💥")) + str(self.rng.randrange(60))

    def add(self) -> None:
        key = self.rng.choice((None, "", "k1", "k2"))
        tokens = self.rng.choice((0, 1, 48, 2**40, 2**53, 2**53 + 1, 2**70))
        self.admit(self.name(), self.rank(), self.prompt(), tokens, key)

    def again(self) -> None:
        """Repeats an add, as it was or with one argument changed."""
        if not self.past:
            return
        changed = list(self.rng.choice(self.past))
        at = self.rng.randrange(10)
        if at < 5:
            changed[at] = (self.name(), self.rank(), self.prompt(), 7, "k3")[at]
        name, place, hashes, tokens, key = changed
        if place in self.model.ranks:
            self.admit(name, place, hashes, tokens, key)

    def admit(
        self, name: str, place: tuple[int, int], hashes: list[int], tokens: int, key: str | None
    ) -> None:
        self.past = [*self.past[-30:], (name, place, hashes, tokens, key)]
        outcome = self.ledger.add(name, self.id_of(place), packed(hashes), tokens, self.now, key)
        assert outcome == self.model.add(name, place, hashes, tokens, self.now, key)

    def some(self) -> str:
        live = list(self.model.requests)
        return self.rng.choice(live) if live and self.rng.random() < 0.9 else self.name()

    def prefill_complete(self) -> None:
        name = self.some()
        assert self.ledger.prefill_complete(name) == self.model.prefill_complete(name)

    def free(self) -> None:
        name = self.some()
        assert self.ledger.free(name) == self.model.free(name)

    def output_block(self) -> None:
        name, fraction = self.some(), self.rng.choice((None, *FRACTIONS, self.rng.random()))
        assert self.ledger.output_block(name, fraction) == self.model.output_block(name, fraction)

    def expire(self) -> None:
        before, limit = self.now - self.rng.randrange(60), self.rng.choice((0, 1, 3, 100))
        assert self.ledger.expire(before, limit) == self.model.expire(before, limit)

    def remove_ranks(self) -> None:
        worker, dp_rank = self.rank()
        dp_ranks = [
            each for each in range(dp_rank + 4) if each == dp_rank or self.rng.random() < 0.5
        ]
        gone = [
            (name, each)
            for each in dp_ranks
            if (worker, each) in self.model.ranks
            for name in self.model.remove_rank((worker, each))
        ]
        assert self.ledger.remove_ranks(worker, dp_ranks) == gone

    def step(self) -> None:
        weights = {
            self.add: 40,
            self.again: 6,
            self.prefill_complete: 10,
            self.free: 22,
            self.output_block: 20,
            self.expire: 2,
            self.remove_ranks: 1,
        }
        self.now += self.rng.choice((0, 1))
        self.ledger, self.model = self.rng.choice(self.sides)
        self.rng.choices(list(weights), weights=list(weights.values()))[0]()

    def compare(self) -> None:
        for _ in self.each_side():
            self.compare_loads()
            self.compare_projection()

    def compare_loads(self) -> None:
        rows = json.loads(b"[" + self.ledger.render_loads() + b"]")
        expected = []
        for place in sorted(self.model.ranks):
            load = self.model.load(place)
            assert self.ledger.load(self.id_of(place)) == load
            expected.append((*place, *load[:2]))
        assert [tuple(row.values()) for row in rows] == expected

    def compare_projection(self) -> None:
        hashes, tokens = self.prompt(), self.rng.choice((0, 16))
        expected = []
        for place in sorted(self.model.ranks):
            prefill, decode, requests = self.model.load(place)
            new = len(hashes) - self.model.depth(place, hashes)
            expected.append((*place, prefill + tokens, decode + new, requests))
        rows = json.loads(self.ledger.project(packed(hashes), tokens))
        assert [tuple(row.values()) for row in rows] == expected, hashes

    def compare_requests(self) -> None:
        for _ in self.each_side():
            self.compare_own_requests()

    def compare_own_requests(self) -> None:
        for name, request in self.model.requests.items():
            live = self.ledger.request(name)
            assert live is not None
            counted = request.tokens if request.prefilling else 0
            assert live[:4] == (*request.rank, len(request.blocks), counted)
            assert live[4:] == (
                request.tokens,
                not request.prefilling,
                request.admitted,
                len(request.outputs),
                None,
            )
        oldest = next(iter(self.model.requests.values()), None)
        assert self.ledger.oldest() == (oldest and oldest.admitted)

    def end(self) -> None:
        """Frees and removes everything, of which nothing may be left."""
        for _ in self.each_side():
            for name in list(self.model.requests):
                assert self.ledger.free(name)
            self.ledger.verify()
            assert self.ledger.stats()["requests"] == 0
        stats = self.ledger.stats()
        sizes = ("blocks", "nodes", "rank_refs", "output_blocks")
        assert [stats[size] for size in sizes] == [0] * 4
        for _ in self.each_side():
            for place in self.model.ranks:
                assert self.ledger.load(self.id_of(place)) == (0, 0, 0)
                self.ledger.remove_ranks(place[0], [place[1]])
            self.ledger.verify()
        assert self.ledger.stats()["bytes"] == Ledger().stats()["bytes"]
