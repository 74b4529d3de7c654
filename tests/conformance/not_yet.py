"""Scenarios that kvd does not pass yet: what is missing, and which scenarios wait for it.

Whoever adds the feature takes its scenarios out of here.
"""

from __future__ import annotations

_WAITING = {
    "there are no peers to start from": [
        "json_of_wrong_kind",
        "peers",
        "recovery_block_size_mismatch",
        "recovery_buffers_live_events",
        "recovery_first_peer_bad",
        "recovery_from_peer",
        "recovery_health_and_pending",
        "recovery_no_peer",
        "recovery_round_trip",
        "recovery_then_live",
        "unknown_route_and_method",
    ],
    "nothing waits for a number of workers at the start": ["cli_min_workers_bad"],
    "there are no metrics": ["listener_paused"],
}

NOT_YET: dict[str, str] = {name: why for why, names in _WAITING.items() for name in names}
