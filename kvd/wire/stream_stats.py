"""Counters of event streams: plain numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(slots=True, eq=False)
class StreamStats:
    """The counters of one stream, or of several added up."""

    messages: int = 0  # well-formed ones, stale ones included
    payload_bytes: int = 0  # of these
    refused: int = 0  # messages of a wrong shape
    bad_frames: dict[str, int] = field(default_factory=dict)  # the same per reason
    dropped: int = 0  # messages that found no room among those that wait; they show as gaps
    stale: int = 0  # messages ignored because their number had been passed
    gaps: int = 0  # times that messages were missing
    replayed: int = 0  # missing messages that a replay brought
    lost: int = 0  # and those that were given up
    replays: dict[str, int] = field(default_factory=dict)  # requests by how they ended (ReplayEnd)
    strays: int = 0  # messages in replays that were no answer to what was asked
    spared_replays: int = 0  # not requested because the server had just been silent
    restarts: int = 0  # engines that were started again
    superseded: int = 0  # times that an engine's own history replaced a peer's blocks
    flawed: int = 0  # batches that could not be understood wholly
    joins: int = 0  # connections on which the worker answered
    losses: int = 0  # of these, how many broke
    crashes: int = 0  # bugs, each of which cost a batch and the connection
    failures: int = 0  # sockets that could not be connected or had to be given up
    unreachable: int = 0  # times that there was no connection for long
    silent: int = 0  # times that no message has come over a new connection for long

    def add(self, other: StreamStats) -> None:
        for each in fields(StreamStats):
            mine, others = getattr(self, each.name), getattr(other, each.name)
            if isinstance(mine, int):
                setattr(self, each.name, mine + others)
            else:
                for key, count in others.items():
                    mine[key] = mine.get(key, 0) + count
