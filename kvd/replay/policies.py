"""Policies of a replay: those of the router and its other modes, with weights of one's own."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.replay.recording import ReplayError
from kvd.selection.policies import RouterPolicy
from kvd_core.selector.settings import KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings

MODES = {"round-robin": ROUND_ROBIN, "random": RANDOM, "least-loaded": LEAST_LOADED}
NAMES = (*RouterPolicy, *MODES)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy by its name, and what differs from it."""

    name: str
    changes: tuple[tuple[str, float], ...] = ()  # members of the core's settings

    def __str__(self) -> str:
        return ",".join([self.name, *(f"{name}={value:g}" for name, value in self.changes)])

    def settings(self) -> Settings:
        changes = dict(self.changes)
        if self.name in MODES:
            return Settings(mode=MODES[self.name], **changes)  # type: ignore[arg-type]
        return Settings(mode=KV, **{**RouterPolicy(self.name).row, **changes})


def parse(text: str, names: tuple[str, ...] = NAMES) -> Policy:
    """Returns the policy of NAME[,WEIGHT=VALUE...]; raises ReplayError."""
    name, *changes = text.split(",")
    if name not in names:
        raise ReplayError(f"there is no policy {name!r}, only {', '.join(names)}")
    pairs = [change.partition("=") for change in changes]
    try:
        policy = Policy(name, tuple((key, float(value)) for key, _, value in pairs))
        if name in NAMES:
            policy.settings()
    except (TypeError, ValueError) as error:
        raise ReplayError(f"{text}: {error}") from None
    return policy
