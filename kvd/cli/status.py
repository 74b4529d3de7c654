"""Asks a running daemon for its health: `kvd status`. Module `status_report` puts it into words.

    /metrics of every face ── interval ── /metrics again ──> sizes, rates
    /workers (indexer), /loads (slot tracker), /services (conductor) ──> workers, loads, streams
    /status (gateway) ──> engines

The command uses public routes only; the daemon does nothing special for it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from kvd.cli.face_client import OTHER_FORM, FaceClient, reason
from kvd.config.binds import Bind
from kvd.faces.common.paths import DIAGNOSE_PATH
from kvd.wire.event_stream import StreamHealth

SHORTEST_S = 0.01  # shortest pause between two samples of `kvd status`

# Routes of each face's lists, by the list's member of `FaceStatus.lists`.
LISTS = {
    "indexer": {"workers": "/workers"},
    "slot-tracker": {"loads": "/loads"},
    "selection": {"workers": "/workers"},
    "conductor": {"publishers": "/services"},
    "gateway": {"status": "/status"},
}

# A metric of each face that no other face has: it shows that the right face answers.
KNOWN_BY = {
    "indexer": "kvd_peers_refused_total",
    "slot-tracker": "kvd_slots_ranks",
    "selection": "kvd_selection_ranks",
    "conductor": "kvd_conductor_publishers",
    "gateway": "kvd_gateway_running_requests",
}

# Where a gateway has several processes, each sample begins with the name of its own.
_PROCESS = re.compile(r'process="([^"]*)",?')
_INDEX_PROCESS = "kvd"  # it holds the index and all loads
_SAMPLE = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")

Samples = dict[tuple[str, str], float]  # by name and labels, as they are written


def read_samples(text: str) -> Samples:
    """Returns the samples of a page in Prometheus' text format."""
    found = map(_SAMPLE.fullmatch, text.split("\n"))
    return {(m["name"], m["labels"] or ""): float(m["value"]) for m in found if m}


def of_one_process(samples: Samples) -> Samples:
    """Returns the samples of a gateway as if it had one process.

    Those about requests are sums, and all others those of the process that holds the index.
    """
    merged: Samples = {}
    for (name, labels), value in samples.items():
        process = _PROCESS.match(labels)
        key = name, labels if process is None else labels[process.end() :]
        if name.startswith("kvd_gateway_"):
            merged[key] = merged.get(key, 0.0) + value
        elif process is None or process[1] == _INDEX_PROCESS:
            merged[key] = value
    return merged


@dataclass
class FaceStatus:
    """The answers of one face."""

    name: str
    bind: Bind
    error: Exception | None = None
    asked_at: float = 0.0  # monotonic time before the first sample
    seconds: float = SHORTEST_S  # from then to the end of the second sample
    before: Samples = field(default_factory=dict)
    after: Samples = field(default_factory=dict)
    lists: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, str]] = field(default_factory=list)  # of the first face that answers

    def value(self, name: str) -> float | None:
        """Returns the sum of a metric over its labels, None if the face does not have it."""
        values = [value for (each, _), value in self.after.items() if each == name]
        return sum(values) if values else None

    def by_label(self, name: str) -> dict[str, float]:
        """Returns the values of a metric that has one label, by the label's value."""
        return {
            labels.partition('"')[2].rstrip('"'): value
            for (each, labels), value in self.after.items()
            if each == name
        }

    def gained(self, name: str) -> float:
        """Returns by how much a counter grew from the first to the second sample.

        After a restart between them, it grew from 0.
        """
        grown = 0.0
        for key, value in self.after.items():
            if re.fullmatch(name, key[0]):
                before = self.before.get(key, 0.0)
                grown += value - before if value >= before else value
        return grown

    def rate(self, name: str) -> float:
        """Returns by how much a counter grew in a second."""
        return self.gained(name) / self.seconds


def check(
    binds: Mapping[str, Bind],
    interval_s: float,
    client: FaceClient,
    may_lack: Collection[str] = (),
) -> list[FaceStatus]:
    """Asks every face twice, at least `interval_s` apart.

    Faces that it `may_lack` are left out if they do not answer; if the gateway is among these, it
    alone is, because the others are then missed.
    """
    faces = [FaceStatus(name, bind) for name, bind in binds.items()]
    begun = time.monotonic()
    for face in faces:
        _try(_read_before, face, client)
    lacking = {face.name for face in faces if face.error is not None}.intersection(may_lack)
    lacking = lacking & {"gateway"} or lacking
    faces = [face for face in faces if face.name not in lacking]
    time.sleep(max(0.0, begun + interval_s - time.monotonic()))
    for face in faces:
        _try(_read_after, face, client)
    if answering := next((face for face in faces if face.error is None), None):
        _try(_read_findings, answering, client)  # every face reports those of the whole process
    return faces


Check = Callable[[FaceStatus, FaceClient], None]


def _try(check: Check, face: FaceStatus, client: FaceClient) -> None:
    """Runs a check on a face that has answered so far; notes its error."""
    if face.error is None:
        try:
            check(face, client)
        except (OSError, HTTPException, ValueError, *OTHER_FORM) as error:
            face.error = error


def _read_before(face: FaceStatus, client: FaceClient) -> None:
    face.asked_at = time.monotonic()
    face.before = _samples(face, client)
    if not any(name == KNOWN_BY[face.name] for name, _ in face.before):
        raise ValueError(f"the server at this address is not a kvd {face.name}")


def _read_after(face: FaceStatus, client: FaceClient) -> None:
    face.after = _samples(face, client)
    face.seconds = max(SHORTEST_S, time.monotonic() - face.asked_at)
    for name, path in LISTS[face.name].items():
        face.lists[name] = json.loads(client.ask(face.bind, path))


def _samples(face: FaceStatus, client: FaceClient) -> Samples:
    samples = read_samples(client.ask(face.bind, "/metrics"))
    return of_one_process(samples) if face.name == "gateway" else samples


def _read_findings(face: FaceStatus, client: FaceClient) -> None:
    face.findings = json.loads(client.ask(face.bind, DIAGNOSE_PATH))["findings"]


def figures(faces: list[FaceStatus]) -> dict[str, Any]:
    """Returns the report that `--json` writes."""
    listening = [face for face in faces if face.by_label("kvd_streams")]
    shown: dict[str, Any] = {
        "faces": {face.name: _face(face) for face in faces},
        "streams": _streams(listening),
        "findings": [finding for face in faces for finding in face.findings],
        "unmatched_models": _first(faces, {"": "kvd_unmatched_models"})[""] or 0,
        "requests_per_s": round(sum(map(_requests, faces)), 1),
        "resident_bytes": _first(faces, {"": "process_resident_memory_bytes"})[""],
        "queued": _first(faces, {"messages": "kvd_queued_messages", "bytes": "kvd_queued_bytes"}),
        "loop": _loop(faces),
        "state": _first(faces, STATE),
        "log_lines_dropped": _first(faces, {"": "kvd_log_lines_dropped_total"})[""],
    }
    if listening:  # all of them show the same index
        one = listening[0]
        tiers = {tier: int(count) for tier, count in one.by_label("kvd_blocks").items()}
        shown["index"] = _first([one], INDEX) | {"tiers": tiers}
        shown["events_per_s"] = round(one.rate("kvd_events_total"), 1)
    for face in faces:
        if face.error is None:
            shown[face.name.replace("-", "_")] = _first([face], SIZES[face.name]) | face.lists
    return shown


def _streams(listening: list[FaceStatus]) -> dict[str, int]:
    """Counts streams by state; indexer and selection share theirs, the conductor has its own."""
    streams = dict.fromkeys(map(str, StreamHealth), 0)
    by_registry = {face.name == "conductor": face for face in reversed(listening)}
    for face in by_registry.values():
        for state, count in face.by_label("kvd_streams").items():
            streams[state] += int(count)
    return streams


INDEX = {"models": "dynamo_kvindexer_models", "blocks": "kvd_index_blocks"} | {
    "bytes": "kvd_index_bytes",
    "parked_blocks": "kvd_parked_blocks",
    "max_blocks": "kvd_index_max_blocks",
    "pairs": "kvd_index_pairs",
    "refused_blocks": "kvd_index_refused_blocks_total",
}
# Metrics of the state directory; a process without one has none of them.
STATE = {
    "recording": "kvd_state_recording",
    "failures": "kvd_state_failures_total",
    "snapshot_age_s": "kvd_state_index_age_seconds",
    "snapshot_bytes": "kvd_state_index_bytes",
}
SIZES = {
    "indexer": {"instances": "dynamo_kvindexer_workers"},
    "slot-tracker": {
        "workers": "kvd_slots_workers",
        "ranks": "kvd_slots_ranks",
        "requests": "kvd_slots_requests",
    },
    "selection": {
        "ranks": "kvd_selection_ranks",
        "waiting": "kvd_selection_waiting",
        "reservations": "kvd_selection_reservations",
        "sessions": "kvd_selection_sessions",
    },
    "conductor": {"registered": "kvd_conductor_publishers"},
    "gateway": {"running": "kvd_gateway_running_requests"},
}


def _first(faces: list[FaceStatus], names: Mapping[str, str]) -> dict[str, int | None]:
    """Returns each metric from the first face that has it."""
    found = {}
    for shown, name in names.items():
        values = [value for face in faces if (value := face.value(name)) is not None]
        found[shown] = int(values[0]) if values else None
    return found


def _loop(faces: list[FaceStatus]) -> dict[str, Any]:
    """Returns how busy the loop was, and its longest stretches, from the first face with them."""
    for face in faces:
        if longest := face.by_label("kvd_loop_longest_stretch_seconds"):
            busy = face.rate("kvd_loop_stretch_seconds_sum")
            ages = face.by_label("kvd_loop_longest_stretch_age_seconds")
            cpu = face.by_label("kvd_loop_longest_stretch_cpu_seconds")
            stretches = {
                cause: {"seconds": longest[cause], "cpu_s": cpu[cause], "age_s": age_s}
                for cause, age_s in ages.items()
            }
            return {"busy": round(busy, 3), "longest": stretches}
    return {"busy": None, "longest": {}}


def _requests(face: FaceStatus) -> float:
    faces = "dynamo_kvindexer|kvd_(slot_tracker|selection|conductor|gateway)"
    return face.rate(rf"({faces})_requests_total")


def _face(face: FaceStatus) -> dict[str, Any]:
    if face.error is not None:
        return {"bind": str(face.bind), "error": reason(face.error)}
    return {"bind": str(face.bind), "requests_per_s": round(_requests(face), 1)}
