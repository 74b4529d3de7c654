"""Compares the expected outcomes of choices with the reported ones, by rank.

    expected   cached tokens, from the booking; seconds to the first token, where speeds are known
    happened   the cached tokens and seconds that the caller reports; without seconds, the time
               until it reported that the prefill was complete

Errors of opposite sign do not cancel: tokens that were expected but not found count apart from
tokens that were found but not expected. All sums run since the start; the rates of the metrics show
the last minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from kvd.model import PartitionKey

Rank = tuple[PartitionKey, int, int]  # worker id, dp rank

MAX_RANKS = 4096  # ranks with an account; reports about further ranks are only counted

# Upper bounds of the relative error |happened - expected| / happened of the time to first token.
ERROR_BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)


@dataclass(slots=True)
class Account:
    """The sums of one rank."""

    reports: int = 0
    expected_cached_tokens: int = 0
    cached_tokens: int = 0
    missing_tokens: int = 0  # expected but not found
    surplus_tokens: int = 0  # found but not expected
    timed: int = 0  # requests with both an expected and an actual time to the first token
    expected_ttft_s: float = 0.0
    ttft_s: float = 0.0
    errors: list[int] = field(default_factory=lambda: [0] * (len(ERROR_BOUNDS) + 1))

    def note_cached(self, expected: int, cached: int) -> None:
        self.reports += 1
        self.expected_cached_tokens += expected
        self.cached_tokens += cached
        self.missing_tokens += max(0, expected - cached)
        self.surplus_tokens += max(0, cached - expected)

    def note_ttft(self, expected_s: float, took_s: float) -> None:
        if took_s <= 0.0:
            return
        self.timed += 1
        self.expected_ttft_s += expected_s
        self.ttft_s += took_s
        self.errors[bisect_left(ERROR_BOUNDS, abs(took_s - expected_s) / took_s)] += 1

    def add(self, other: Account) -> None:
        """Adds the sums of another account."""
        for each in fields(self):
            if each.name != "errors":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        self.errors = [
            mine + theirs for mine, theirs in zip(self.errors, other.errors, strict=True)
        ]

    def error_at(self, share: float) -> float | None:
        """Returns the least of ERROR_BOUNDS that a share of requests keeps, None without one."""
        left = share * self.timed
        for bound, count in zip(ERROR_BOUNDS, self.errors, strict=False):
            left -= count
            if left <= 0:
                return bound
        return None


class Regret:
    """The accounts of all ranks."""

    def __init__(self) -> None:
        self.accounts: dict[Rank, Account] = {}
        self.unplaced = 0

    def account_of(self, rank: Rank) -> Account | None:
        """Returns the account of a rank, None beyond the bound."""
        account = self.accounts.get(rank)
        if account is None:
            if len(self.accounts) >= MAX_RANKS:
                self.unplaced += 1
                return None
            account = self.accounts[rank] = Account()
        return account

    def note_cached(self, rank: Rank, expected: int, cached: int) -> None:
        """Adds the expected and the reported cached tokens of a request."""
        if (account := self.account_of(rank)) is not None:
            account.note_cached(expected, cached)

    def note_ttft(self, rank: Rank, expected_s: float | None, took_s: float) -> None:
        """Adds the seconds to the first token of a request, unless none were expected."""
        if expected_s is not None and (account := self.account_of(rank)) is not None:
            account.note_ttft(expected_s, took_s)

    def forget(self, gone: list[Rank]) -> None:
        """Forgets the accounts of ranks that have left."""
        for rank in gone:
            self.accounts.pop(rank, None)

    def rows(self) -> Iterator[tuple[Rank, Account]]:
        """Yields the accounts, sorted by rank."""
        yield from sorted(self.accounts.items())
