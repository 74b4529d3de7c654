"""Reports the health of a running daemon: `kvd status`.

    /metrics of every face ── interval ── /metrics again ──> sizes, rates
    /workers (indexer), /loads (slot tracker), /services (conductor) ──> workers, loads, streams
    /status (gateway) ──> engines

The command uses public routes only; the daemon does nothing special for it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from kvd.cli.face_client import EXIT_UNREACHABLE, OTHER_FORM, FaceClient, reason
from kvd.config.parsers import Bind
from kvd.faces.common.paths import DIAGNOSE_PATH
from kvd.selection.worker_record import WorkerLifecycle
from kvd.wire.event_stream import StreamHealth

EXACT, INEXACT = 0, 1  # exit codes, beside EXIT_UNREACHABLE

SHORTEST_S = 0.01  # shortest pause between two samples of `kvd status`
SERVING = "serving"  # the standing of an engine in use, as a gateway's /status says it
MOST_LINES = 20  # inexact streams that the text lists; further ones are counted

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


def exit_code(shown: Mapping[str, Any]) -> int:
    """Returns the exit code: 2 if a face does not answer, 1 if anything else is wrong, else 0."""
    if not shown["faces"] or any("error" in face for face in shown["faces"].values()):
        return EXIT_UNREACHABLE
    inexact = sum(count for state, count in shown["streams"].items() if state != StreamHealth.EXACT)
    workers = shown.get("selection", {}).get("workers", [])
    unscheduled = any(each["lifecycle"] != WorkerLifecycle.SCHEDULABLE for each in workers)
    unserved = any(_unserved(shown))
    return INEXACT if inexact or unscheduled or unserved or shown["unmatched_models"] else EXACT


def text(shown: Mapping[str, Any]) -> Iterator[str]:
    """Yields the report as lines for people."""
    for name, face in shown["faces"].items():
        remark = face.get("error") or f"{face['requests_per_s']:,} requests/s"
        yield f"{name:13} {face['bind']}  {remark}"
    if any("error" not in face for face in shown["faces"].values()):
        counts = (f"{count:,} {state}" for state, count in shown["streams"].items() if count)
        yield f"{'streams':13} {', '.join(counts) or 'none'}"
    if "index" in shown:
        yield from _index(shown["index"])
        yield f"{'events':13} {shown['events_per_s']:,}/s"
    yield from _faces(shown)
    yield from _process(shown)
    if shown["findings"]:
        names = ", ".join(dict.fromkeys(each["name"] for each in shown["findings"]))
        yield f"{'findings':13} {len(shown['findings']):,}: {names}; `kvd doctor` explains them"
    yield from _inexact(shown)


def _index(index: Mapping[str, Any]) -> Iterator[str]:
    tiers = ", ".join(f"{tier} {count:,}" for tier, count in index["tiers"].items())
    yield (
        f"{'index':13} {index['blocks']:,} blocks, {index['models']:,} models, "
        f"{_mib(index['bytes'])}; by rank and tier: {tiers}"
    )
    if index["max_blocks"] or index["refused_blocks"]:
        limit = f"{index['max_blocks']:,} blocks" if index["max_blocks"] else "none"
        yield (
            f"{'index limit':13} {limit}; {index['pairs']:,} "
            f"(rank, block) pairs; {index['refused_blocks']:,} blocks refused"
        )


def _faces(shown: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the faces beside the indexer count."""
    for name in ("slot_tracker", "selection"):
        if name in shown:
            sizes = {key: value for key, value in shown[name].items() if isinstance(value, int)}
            figures = ", ".join(f"{value:,} {key}" for key, value in sizes.items())
            yield f"{name.replace('_', ' '):13} {figures}"
    yield from _loads(shown.get("slot_tracker", {}).get("loads", []))
    if "conductor" in shown:
        yield f"{'conductor':13} {shown['conductor']['registered']:,} publishers"
    if "gateway" in shown:
        engines = shown["gateway"]["status"]["upstreams"]
        serving = sum(each["standing"] == SERVING for each in engines)
        running = f"{shown['gateway']['running']:,} requests in progress"
        yield f"{'engines':13} {serving:,} of {len(engines):,} serve, {running}"


def _process(shown: Mapping[str, Any]) -> Iterator[str]:
    """Yields what the process uses, keeps and has dropped."""
    if shown["resident_bytes"] is not None:
        yield f"{'memory':13} {_mib(shown['resident_bytes'])}"
    if shown["loop"]["longest"]:
        yield f"{'loop':13} {_stretches(shown['loop'])}"
    if shown["state"]["recording"] is not None:
        yield f"{'state':13} {_kept(shown['state'])}"
    if shown["queued"]["messages"]:
        messages, size = shown["queued"]["messages"], shown["queued"]["bytes"]
        yield f"{'queued':13} {messages:,} messages, {_mib(size)}"
    if shown["log_lines_dropped"]:
        yield f"{'log':13} {shown['log_lines_dropped']:,} lines dropped"


def _stretches(loop: Mapping[str, Any]) -> str:
    longest = loop["longest"]
    cause = max(longest, key=lambda each: longest[each]["seconds"])
    stretch = longest[cause]
    wall, cpu = (f"{stretch[each] * 1e3:,.1f} ms" for each in ("seconds", "cpu_s"))
    name = cause.replace("_", " ")
    worst = f"longest stretch {wall} ({cpu} of CPU), {name}, {stretch['age_s']:.0f} s ago"
    return f"{loop['busy']:.1%} busy; {worst}"


def _kept(state: Mapping[str, Any]) -> str:
    recorded = "bookings recorded" if state["recording"] else "bookings NOT recorded"
    age, size = state["snapshot_age_s"], state["snapshot_bytes"]
    kept = "no snapshot yet" if age is None else f"snapshot {age} s old, {_mib(size)}"
    return f"{recorded}; {kept}; {state['failures']:,} failed writes"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def _loads(rows: list[dict[str, Any]]) -> Iterator[str]:
    if rows:
        tokens = sum(row["active_prefill_tokens"] for row in rows)
        blocks = sum(row["active_decode_blocks"] for row in rows)
        most = max(rows, key=lambda row: row["active_decode_blocks"])
        yield (
            f"{'loads':13} {tokens:,} tokens to prefill, {blocks:,} blocks in use; most: worker "
            f"{most['worker_id']} rank {most['dp_rank']}, {most['active_decode_blocks']:,}"
        )


def _inexact(shown: Mapping[str, Any]) -> Iterator[str]:
    """Yields what is wrong: engines out of use, inexact streams, unmatched models and the like."""
    workers = shown.get("indexer", {}).get("workers", [])
    chosen = shown.get("selection", {}).get("workers", [])
    rows = list(_unserved(shown))
    rows += [
        f"{_named(each, 'instance_id')}: {each['stream']}, {each['status']}"
        f"{_remarks(each['listeners'])}"
        for each in workers
        if each["stream"] != StreamHealth.EXACT
    ]
    for each in chosen:
        name = _named(each, "worker_id")
        if each["lifecycle"] != WorkerLifecycle.SCHEDULABLE:
            rows.append(
                f"{name}: {each['lifecycle']}: {'; '.join(each['not_schedulable_reasons'])}"
            )
        elif worst := _worst(each.get("listeners", {})):
            rows.append(
                f"{name}: {worst['stream']}, {worst['status']}{_remarks(each['listeners'])}"
            )
    warned = [each for each in workers + chosen if "warning" in each]
    rows += [f"{each['model_name']}/{each['tenant_id']}: {each['warning']}" for each in warned]
    rows = list(dict.fromkeys(rows))  # two faces may have the same worker, or many one model
    rows += [
        f"publisher {each['InstanceID']} rank {each['DPRank']} of {each['ModelName']}: "
        f"{each['stream']}, {each['status']}"
        for each in shown.get("conductor", {}).get("publishers", {}).get("services", [])
        if each["stream"] != StreamHealth.EXACT
    ]
    yield from (f"  {row}" for row in rows[:MOST_LINES])
    if len(rows) > MOST_LINES:
        yield f"  and {len(rows) - MOST_LINES:,} more"


def _unserved(shown: Mapping[str, Any]) -> Iterator[str]:
    """Yields the engines that a gateway does not use, and names and kvds that lead nowhere."""
    status = shown.get("gateway", {}).get("status", {})
    if status and not status["upstreams"] and not status["names"]:
        yield "the gateway has no engine"
    for each in status.get("names", ()):
        if not each["addresses"]:
            yield f"engines of {each['name']}: {each['problem'] or 'not looked up yet'}"
    for each in status.get("upstreams", ()):
        if each["standing"] != SERVING:
            yield f"engine {each['url']}: {each['problem'] or each['standing']}"
    for each in status.get("kvds", ()):
        if not each["up"]:
            yield f"kvd {each['url']}: {each['problem']}"


def _named(worker: Mapping[str, Any], id_member: str) -> str:
    return f"worker {worker[id_member]} of {worker['model_name']}/{worker['tenant_id']}"


def _worst(listeners: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the listener with the worst stream, None if all are exact."""
    order = list(StreamHealth)
    worst = min(listeners.values(), key=lambda each: order.index(each["stream"]), default=None)
    return None if worst is None or worst["stream"] == StreamHealth.EXACT else worst


def _remarks(listeners: Mapping[str, Any]) -> str:
    """Returns the remarks on the first inexact rank that has any."""
    for rank, listener in listeners.items():
        remarks = [listener[name] for name in ("quiet", "last_error", "loss") if name in listener]
        if listener["stream"] != StreamHealth.EXACT and remarks:
            return f"; rank {rank}: {', '.join(remarks)}"
    return ""
