"""The report of `kvd status` for people, and its exit code, from the figures of `status`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvd.cli.face_client import EXIT_UNREACHABLE
from kvd.selection.worker_record import WorkerLifecycle
from kvd.wire.event_stream import StreamHealth

EXACT, INEXACT = 0, 1  # exit codes, beside EXIT_UNREACHABLE

SERVING = "serving"  # the standing of an engine in use, as a gateway's /status says it
MOST_LINES = 20  # inexact streams that the text lists; further ones are counted


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
