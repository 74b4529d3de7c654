"""Loads scenarios and plays them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.conformance.failure import Failure
from tests.conformance.steps import Stage, Step, Target
from tests.support.http_client import Client


@dataclass(frozen=True)
class Scenario:
    """One scenario; FORMAT.md explains its members."""

    name: str
    about: str
    source: str
    face: str
    steps: list[Step]
    finally_: list[Step]
    spawns: bool
    peer_differs: str | None

    @classmethod
    def load(cls, path: Path) -> Scenario:
        members: dict[str, Any] = json.loads(path.read_text())
        return cls(
            name=members["name"],
            about=members["about"],
            source=members["source"],
            face=members["face"],
            steps=members["steps"],
            finally_=members.get("finally", []),
            spawns="spawn" in members.get("needs", []),
            peer_differs=members.get("peer_differs"),
        )


def load_all(paths: Iterable[Path]) -> list[Scenario]:
    return [Scenario.load(path) for path in sorted(paths)]


def play(
    scenario: Scenario,
    target: Target,
    client: Client,
    log: Callable[[str], None] = lambda line: None,
) -> None:
    """Plays one scenario and undoes what it did; raises Failure."""
    stage = Stage(target, client, log)
    try:
        for number, step in enumerate(scenario.steps, 1):
            try:
                stage.play(step)
            except Failure as failure:
                raise Failure(f"{scenario.about}\nstep {number}: {failure}") from None
    finally:
        for step in scenario.finally_:
            with contextlib.suppress(Failure):
                stage.play(step)
        stage.close()
