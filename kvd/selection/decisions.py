"""The decision log: one line for each booked choice, and one for each later step of its request.

    choice            the time, model and request, the prompt's length and block hashes, the
                      candidates that cached most of it, the chosen rank, its cost, the forecast
    prefill_complete  the time
    end               the time, and the output tokens if the engine reports output blocks

Each line is a JSON object. It holds no text and no token ids of the prompt, only rolling hashes:
one for every LOGGED_TOKENS, so that the line of a long prompt stays short. `kvd replay` reads the
log (kvd/replay/decision_log.py).

Other replicas log their choices themselves. A selection that is never booked is in no log: nobody
knows whether its request was sent.
"""

from __future__ import annotations

import json
from array import array
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping

from kvd.model import PartitionKey
from kvd.selection.candidates import Candidates
from kvd.slots.live_requests import Moment
from kvd.telemetry.metrics import Family, by_label, gauge
from kvd.telemetry.rotating import RotatingWriter
from kvd.wire.lifecycle import Step
from kvd_core.base.hashing import sequence_hashes
from kvd_core.ledger.ledger import LiveRequest

# Tokens that one logged hash stands for, or a block if that is longer: a prompt of 100,000 tokens
# has 200 hashes, 2 kB.
LOGGED_TOKENS = 512
MAX_LOGGED_HASHES = 2048  # hashes of one prompt, a million tokens; the rest of it is not logged
MAX_MATCHED = 8  # candidates in one line, those that cache most of the prompt

CHOICE, PREFILL_COMPLETE, END = "choice", "prefill_complete", "end"

_dumps = json.JSONEncoder(separators=(",", ":")).encode


def outcome(moment: Moment, live: LiveRequest, candidates: Candidates) -> dict[str, object]:
    """Returns the members of a choice: the rank just booked and its cost; O(candidates)."""
    pool = candidates.pool  # this prompt is the last that it has matched
    chosen = pool.find(live.worker_id, live.dp_rank)
    assert chosen is not None
    row = pool.explained(chosen, candidates.settings)
    return {
        "model": moment.key.model_name,
        "tenant": moment.key.tenant_id,
        "request": moment.request_id,
        "candidates": len(pool),
        "worker_id": live.worker_id,
        "dp_rank": live.dp_rank,
        "cost": row.cost,
        "cached_tokens": row.cached_tokens,
        "prefill_tokens": row.effective_prefill_tokens,
        "queued_tokens": row.active_prefill_tokens,
        "expected_output_tokens": live.expected_output_tokens,
    }


class DecisionLog:
    """Logs the steps of the reservations of a service."""

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        writer: RotatingWriter,
        wall_ns: Callable[[], int],
        *,
        shares_blocks: bool = True,
    ) -> None:
        """`wall_ns` returns nanoseconds since 1970.

        Without `shares_blocks` the sequence hashes of bookings are random, so the log computes
        them from the local hashes instead.
        """
        self._candidates = candidates
        self._writer = writer
        self._wall_ns = wall_ns
        self._shares_blocks = shares_blocks

    def note(self, moment: Moment) -> None:
        """Logs a step of a reservation; O(candidates + hashes of the prompt)."""
        if moment.step is not Step.ADD:
            self._write(self._later(moment))
        elif moment.live is not None and not moment.mirrored:
            self._write(self._choice(moment, moment.live))

    def _write(self, line: dict[str, object]) -> None:
        self._writer.write(_dumps(line).encode() + b"\n")

    def _later(self, moment: Moment) -> dict[str, object]:
        line: dict[str, object] = {"at": self._wall_ns() // 1000 / 1e6}
        if moment.step is not Step.FREE:
            return line | {"event": PREFILL_COMPLETE, "request": moment.request_id}
        line |= {"event": END, "request": moment.request_id}
        if moment.live is None:
            return line | {"dropped": True}  # the request was too old, or its rank was removed
        block_size = self._candidates[moment.key].ledger_block_size or 0
        return line | {"output_tokens": moment.live.output_blocks * block_size or None}

    def _choice(self, moment: Moment, live: LiveRequest) -> dict[str, object]:
        candidates = self._candidates[moment.key]
        pool = candidates.pool  # this prompt is the last that it has matched
        prompt = pool.hold()
        stride = max(1, LOGGED_TOKENS // pool.block_size)
        hashes = array("Q", prompt.sequence_hashes)
        if not self._shares_blocks:
            hashes = array("Q", sequence_hashes(array("Q", prompt.local_hashes)))
        logged = hashes[stride - 1 :: stride][:MAX_LOGGED_HASHES]
        return {
            "at": self._wall_ns() // 1000 / 1e6,
            "event": CHOICE,
            **outcome(moment, live, candidates),
            "prompt_tokens": prompt.isl_tokens,
            "hashed_tokens": stride * pool.block_size,
            "hashes": b64encode(logged.tobytes()).decode(),
            "matched": pool.deepest(MAX_MATCHED),
        }

    def families(self) -> Iterator[Family]:
        """Yields the log's families of /metrics."""
        writer = self._writer
        help = "Number of lines of the decision log, by outcome"
        lines = {
            "accepted": writer.accepted,
            "dropped": writer.dropped,
            "failed": writer.failed,
        }
        yield by_label("kvd_decision_log_lines_total", "counter", help, "outcome", lines)
        help = "Size of the lines of the decision log that wait to be written, in bytes"
        yield gauge("kvd_decision_log_waiting_bytes", help, writer.waiting_bytes)
