"""A plain model of one event stream: status and health, derived from the history of its events.

Nothing is kept between two questions: each reads the whole history again. An event is a tuple of a
name, a moment, and details:

    connecting, receiving, joined, lost, failed, paused    the connection
    applied kind        a batch in order: "plain", "flawed", or "emptied" (a clear)
    held kind gap       a batch that is held back behind `gap` missing numbers, until "replay"
    replay how          the replay before the held batch has ended, and the batch is applied
    asked               an idle engine is asked whether it is the same; "answer" follows
    answer how new      its answer, with `new` batches that had not been heard

How a replay or an answer ends:

    same        with the last batch, the missing ones and the held one, all of the known engine
    other       with a different last batch: it is another engine, all of whose batches are replayed
    forgotten   without the last batch and the missing ones, which are not kept any more
    empty       with nothing: the engine keeps no batches
    silent      nothing comes
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

STALE_AFTER_S = 30.0

Happened = tuple[Any, ...]


def is_connected(history: list[Happened]) -> bool:
    changes = [what for what, *_ in history if what in ("joined", "lost", "failed", "paused")]
    return changes[-1:] == ["joined"]


def status(history: list[Happened]) -> str:
    """Returns the status by the last failure, pause or new socket, and the events behind that."""
    names = [what for what, *_ in history]
    since: list[str] = []
    for name in names:
        if name in ("connecting", "failed", "paused"):
            since = []
        since.append(name)
    if since[:1] in (["failed"], ["paused"]):
        return since[0]
    return "active" if {"joined", "receiving"} <= set(since) else "pending"


def disconnected_since(history: list[Happened]) -> float | None:
    """Returns when the last connection ended, None while connected and before the first one."""
    since = None
    for at, (what, moment, *_) in enumerate(history):
        if what == "joined":
            since = None
        elif what in ("lost", "failed", "paused") and is_connected(history[:at]):
            since = moment
    return since


@dataclass
class Beliefs:
    """What kvd may conclude from a history."""

    passed: int = 0  # numbers of this engine: applied or lost
    has_received: bool = False  # a batch has come since the connection was made
    lacking: bool = False  # something that was lost may matter
    ever_lost: bool = False  # something was lost; unlike `lacking`, a clear does not end it
    doubted: bool = False  # the engine may be another one
    broken: bool = False  # the connection was lost and is not made again
    unknown: bool = False  # the engine was asked, and its answer did not show which one it is
    cleared_at: int | None = None  # a clear that counts once the engine is shown to be the same
    held: tuple[str, int] | None = None
    held_at: int = 0  # `losses` when the batch was held
    is_checked: bool = False  # the replay before the held batch has to show which engine sent it
    asked_at: int | None = None  # `losses` when the idle engine was asked
    losses: int = 0  # lost connections

    def apply(self, kind: str) -> None:
        self.passed += 1
        self.has_received = True
        if kind == "flawed":
            self.lacking = True
        elif kind == "emptied" and self.unknown and (self.lacking or self.ever_lost):
            self.cleared_at = self.passed
            self.doubted = True
        elif kind == "emptied":
            self.lacking = False

    def lose(self, numbers: int) -> None:
        self.passed += numbers
        self.lacking = self.ever_lost = True

    def show_same(self) -> None:
        self.unknown = False
        if self.cleared_at == self.passed:
            self.lacking = False
        self.cleared_at = None

    def forget(self) -> None:
        """Notes that another engine publishes now."""
        self.passed = 0
        self.lacking = self.ever_lost = self.unknown = False
        self.cleared_at = None
        self.has_received = True

    def drop(self) -> None:
        self.doubted = self.doubted or (self.held is not None and self.is_checked)
        self.held = self.asked_at = None
        self.is_checked = False


def beliefs(history: list[Happened], *, can_ask: bool) -> Beliefs:
    """Returns what follows from a history; `can_ask`: the engine has a replay server."""
    now = Beliefs()
    for at, (what, _, *details) in enumerate(history):
        if what in ("lost", "failed") and is_connected(history[:at]):
            now.losses += 1
            now.broken = True
            now.doubted = can_ask
        if what in ("failed", "paused"):
            now.drop()
        elif what == "joined":
            now.doubted = now.doubted or (now.broken and can_ask)
            now.broken = now.has_received = False
        elif what == "applied":
            now.apply(*details)
        elif what == "held":
            now.held = details[0], details[1]
            now.held_at = now.losses
            now.is_checked = now.doubted or now.unknown
            now.doubted = False
        elif what == "replay":
            # The engine that answers after a lost connection may be another one.
            if can_ask and now.held_at != now.losses:
                now.is_checked = now.doubted = True
            _replay(now, *details)
        elif what == "asked":
            now.asked_at = now.losses
        elif what == "answer":
            _answer(now, *details, connected=is_connected(history[:at]))
    return now


def _replay(now: Beliefs, how: str) -> None:
    assert now.held is not None
    (kind, gap), now.held = now.held, None
    if how == "other":
        gap += now.passed
        now.forget()
    elif how == "same" and now.is_checked and now.passed:
        now.show_same()
    if how in ("same", "other"):
        now.passed += gap
    else:
        if now.is_checked:
            now.unknown = True
        if now.is_checked and how != "silent":
            now.lose(0)
        if gap:
            now.lose(gap)
    now.is_checked = False
    now.apply(kind)


def _answer(now: Beliefs, how: str, new: int, *, connected: bool) -> None:
    same_link = connected and now.asked_at == now.losses
    now.asked_at = None
    now.has_received = how in ("same", "other", "empty") and same_link
    if how == "same":
        now.show_same()
    elif how == "forgotten":
        now.unknown = True
        now.lose(0)
    elif how in ("other", "empty"):
        now.forget()
        now.has_received = same_link and new > 0
    now.passed += new
    now.doubted = how == "silent" or not same_link


def health(history: list[Happened], moment: float, *, can_ask: bool) -> str:
    since = disconnected_since(history)
    if since is not None and moment - since > STALE_AFTER_S:
        return "stale"
    now = beliefs(history, can_ask=can_ask)
    if now.held is not None or now.asked_at is not None:
        return "recovering"
    if now.lacking:
        return "degraded"
    return "exact" if now.has_received else "recovering"


def asks(history: list[Happened], *, can_ask: bool) -> bool:
    """Returns whether an idle engine is to be asked whether it is the same."""
    now = beliefs(history, can_ask=can_ask)
    idle = now.held is None and now.asked_at is None
    return now.doubted and idle and now.passed > 0 and is_connected(history)
