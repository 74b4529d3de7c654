"""Scenarios that kvd does not pass yet: what is missing, and which scenarios wait for it.

Whoever adds the feature takes its scenarios out of here.
"""

from __future__ import annotations

_WAITING = {
    "lost batches are not asked for again": [
        "replay_after_reregister",
        "replay_bad_batch_inside",
        "replay_buffer_too_small",
        "replay_empty",
        "replay_engine_restart",
        "replay_fills_gap",
        "replay_last_seq_persists",
        "replay_late_join",
        "replay_rank_in_batch",
    ],
    "listeners cannot be paused": ["listener_paused"],
}

NOT_YET: dict[str, str] = {name: why for why, names in _WAITING.items() for name in names}
