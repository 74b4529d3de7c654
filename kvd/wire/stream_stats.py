"""Counters of event streams: plain numbers that only grow."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from operator import attrgetter

from kvd.wire.in_order import Taken


@dataclass(slots=True, eq=False)
class StreamStats(Taken):
    """The counters of one stream, or of several added up."""

    refused: int = 0  # malformed messages
    bad_frames: dict[str, int] = field(default_factory=dict)  # malformed messages, by reason
    dropped: int = 0  # messages that the inbox had no room for; they show as gaps
    stale: int = 0  # messages ignored because their number had been passed
    gaps: int = 0  # times that messages were missing
    replayed: int = 0  # missing messages that a replay brought
    lost: int = 0  # missing messages that were given up
    replays: dict[str, int] = field(default_factory=dict)  # replays, by their end (ReplayEnd)
    strays: int = 0  # messages in replays that did not fit the request
    spared_replays: int = 0  # replays not requested because the server had just been silent
    restarts: int = 0  # restarts of engines that were noticed
    superseded: int = 0  # times that an engine's own history replaced a peer's blocks
    flawed: int = 0  # batches that were not wholly understood
    joins: int = 0  # connections on which the worker answered
    losses: int = 0  # of these, how many broke
    crashes: int = 0  # bugs; each cost a batch and the connection
    failures: int = 0  # links that could not be made or had to be given up
    unreachable: int = 0  # times that there was no connection for long
    silent: int = 0  # times that no message came over a new connection for long

    def add(self, other: StreamStats) -> None:
        # A scrape adds up thousands of streams, and most of their counts are 0.
        for name, count in zip(_COUNTS, _counts(other), strict=True):
            if count:
                setattr(self, name, getattr(self, name) + count)
        for mine, others in (
            (self.bad_frames, other.bad_frames),
            (self.replays, other.replays),
        ):
            for key, count in others.items():
                mine[key] = mine.get(key, 0) + count


_COUNTS = tuple(each.name for each in fields(StreamStats) if each.type == "int")
_COUNTS += ("messages", "payload_bytes")
_counts = attrgetter(*_COUNTS)
