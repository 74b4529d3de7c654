"""Readiness of the service for selections, and what delays it at the start.

A service without schedulable workers is never ready. With workers it is ready once recovery from
its peers has ended and the initial number of workers has been there at one time; some of these may
have left since.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Recovery(StrEnum):
    """The state of recovery from a peer."""

    OFF = "off"  # there are no peers
    RUNNING = "running"
    DONE = "done"
    EMPTY = "empty"  # no peer had an index


class Readiness:
    """The readiness of one service."""

    def __init__(self, min_initial_workers: int = 0, peers: int = 0) -> None:
        self.min_initial_workers = min_initial_workers
        self.peers = peers
        self.recovery = Recovery.RUNNING if peers else Recovery.OFF
        self.recovered_blocks = 0
        self.enough = min_initial_workers == 0  # that many workers have been there at one time

    def note_recovery(self, outcome: Recovery, blocks: int) -> None:
        """Notes the outcome of recovery, and how many blocks it has brought."""
        self.recovery, self.recovered_blocks = outcome, blocks

    def note(self, schedulable: int) -> None:
        """Notes the number of schedulable workers, at every change of it."""
        self.enough = self.enough or schedulable >= self.min_initial_workers

    def reasons(self, schedulable: int, gone: int) -> list[str]:
        """Returns why the service is not ready; `gone` workers have lost their engines."""
        reasons = []
        if self.recovery is Recovery.RUNNING:
            reasons.append("recovery from a peer is in progress")
        if not self.enough:
            reasons.append(
                f"{schedulable} of {self.min_initial_workers} initial workers are schedulable"
            )
        elif not schedulable and gone:
            reasons.append(
                f"{gone} workers have lost their event connections, and none is schedulable"
            )
        elif not schedulable:
            reasons.append("no worker is schedulable")
        return reasons

    def shown(self) -> dict[str, Any]:
        """Returns the members that do not depend on the number of workers."""
        recovery = {"state": self.recovery, "peers": self.peers, "blocks": self.recovered_blocks}
        return {"min_initial_workers": self.min_initial_workers, "recovery": recovery}
