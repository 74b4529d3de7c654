"""Routing policies of a replay: a policy of the router, or a mode that ignores the caches."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.replay.recording import ReplayError
from kvd.selection.policies import Policy, RouterPolicy
from kvd_core.selector.settings import KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings

MODES = {"round-robin": ROUND_ROBIN, "random": RANDOM, "least-loaded": LEAST_LOADED}
NAMES = (*RouterPolicy, *MODES)
TEMPERATURE = "temperature="  # what a policy's text may end with, beside its weights


@dataclass(frozen=True, slots=True)
class Chooser:
    """A policy with some weights of its own, or a mode, by what it is called."""

    text: str

    def __str__(self) -> str:
        return self.text

    def settings(self) -> Settings:
        """Returns what it is to the core; raises ValueError."""
        if self.text in MODES:
            return Settings(mode=MODES[self.text])
        policy, _, temperature = self.text.partition("," + TEMPERATURE)
        return Settings(mode=KV, temperature=float(temperature or 0), **Policy.parse(policy).row)


DEFAULT = Chooser("dynamo"), Chooser("kvd")  # of a replay that names none


def parse(text: str) -> Chooser:
    """Reads NAME[,WEIGHT=NUMBER]...[,temperature=NUMBER], or a mode; raises ReplayError."""
    name = text.partition(",")[0]
    if name not in NAMES:
        raise ReplayError(f"there is no policy {name!r}, only {', '.join(NAMES)}")
    chooser = Chooser(text)
    try:
        chooser.settings()
    except (TypeError, ValueError) as error:
        raise ReplayError(f"{text}: {error}") from None
    return chooser
