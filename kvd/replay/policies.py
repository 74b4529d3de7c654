"""Routing policies of a replay: a policy of the router, or a mode that ignores the caches."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.replay.recording import ReplayError
from kvd.selection.policies import Policy, RouterPolicy
from kvd_core.selector.settings import KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings

MODES = {"round-robin": ROUND_ROBIN, "random": RANDOM, "least-loaded": LEAST_LOADED}
NAMES = (*RouterPolicy, *MODES)
TEMPERATURE = "temperature="  # may begin the last part of a policy's text, after its weights


@dataclass(frozen=True, slots=True)
class Chooser:
    """A policy, with weights of its own or without, or a mode, by its text."""

    text: str

    def __str__(self) -> str:
        return self.text

    def settings(self) -> Settings:
        """Returns its settings for the core; raises ValueError."""
        if self.text in MODES:
            return Settings(mode=MODES[self.text])
        policy, _, temperature = self.text.partition("," + TEMPERATURE)
        return Settings(mode=KV, temperature=float(temperature or 0), **Policy.parse(policy).row)


DEFAULT = Chooser("dynamo"), Chooser("kvd")  # where a replay names no policies


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
