"""Whether selections should be asked for, and what they wait for at the start.

A service without workers is never ready. With workers it is ready once it has asked its peers for
their index, and once as many workers have been there as were to be waited for: those may leave.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any


class Recovery(StrEnum):
    """How far taking the index from a peer has come."""

    OFF = "off"  # there are no peers
    RUNNING = "running"
    DONE = "done"
    EMPTY = "empty"  # no peer had one


class Readiness:
    """The start of one service."""

    def __init__(self, min_initial_workers: int = 0, peers: int = 0) -> None:
        self.min_initial_workers = min_initial_workers
        self.peers = peers
        self.recovery = Recovery.RUNNING if peers else Recovery.OFF
        self.recovered_blocks = 0
        self.enough = min_initial_workers == 0  # have been there at once

    def note(self, schedulable: int) -> None:
        """Takes note of how many workers there are; called with every change of that."""
        self.enough = self.enough or schedulable >= self.min_initial_workers

    def reasons(self, schedulable: int, gone: int) -> list[str]:
        """Says what is waited for; [] if nothing is. `gone` workers have lost their engines."""
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
        """Returns what is the same for any number of workers."""
        recovery = {"state": self.recovery, "peers": self.peers, "blocks": self.recovered_blocks}
        return {"min_initial_workers": self.min_initial_workers, "recovery": recovery}
