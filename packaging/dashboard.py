#!/usr/bin/env python3
"""Writes the Grafana dashboard: `python packaging/dashboard.py > packaging/grafana/kvd.json`.

Each row of the dashboard is a question, and its panels are figures that answer it. It serves any
kvd: panels about parts that a process does not have, such as a gateway, stay empty.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

WIDTH, HEIGHT = 8, 7  # of a panel, in Grafana's units; a row is 24 wide

HERE = 'instance=~"$instance"'


class Panel(NamedTuple):
    """One graph: its title, unit, and expressions by legend."""

    title: str
    unit: str
    lines: dict[str, str]
    about: str = ""


def rate(name: str, by: str = "") -> str:
    return f"sum by ({labels(by)}) (rate({name}{{{HERE}}}[$__rate_interval]))"


def value(name: str, by: str = "", of: str = "sum") -> str:
    return f"{of} by ({labels(by)}) ({name}{{{HERE}}})"


def quantile(share: float, name: str, by: str = "") -> str:
    return f"histogram_quantile({share}, {rate(f'{name}_bucket', f'{by}, le'.lstrip(', '))})"


def share(part: str, whole: str) -> str:
    return f"{rate(part)} / {rate(whole)}"


def spread(name: str) -> str:
    return f"{value(name, of='max')} / {value(name, of='avg')}"


def labels(by: str) -> str:
    """Returns the labels to sum by: by address too, as each face shows the process's figures."""
    return f"instance, {by}" if by else "instance"


ROWS: dict[str, list[Panel]] = {
    "Can the index be believed?": [
        Panel("Streams", "short", {"{{state}}": value("kvd_streams", "state")}),
        Panel("Quiet engines", "short", {"{{why}}": value("kvd_quiet_streams", "why")}),
        Panel("Batches lost", "ops", {"": rate("kvd_listener_lost_total")}),
        Panel("Events", "ops", {"{{type}}": rate("kvd_events_total", "type")}),
        Panel(
            "Events without effect",
            "ops",
            {"{{reason}}": rate("kvd_events_ignored_total", "reason")},
        ),
        Panel("Models that never match", "short", {"": value("kvd_unmatched_models")}),
    ],
    "Is routing good?": [
        Panel(
            "Share of prompts that was cached",
            "percentunit",
            {"": share("kvd_selection_cached_tokens_total", "kvd_selection_prompt_tokens_total")},
            "At the chosen ranks, by the index; blocks in lower tiers count in part.",
        ),
        Panel(
            "Matched tokens",
            "short",
            {
                "prompts": rate("kvd_selection_prompt_tokens_total"),
                "cached": rate("kvd_selection_cached_tokens_total"),
            },
            "A second.",
        ),
        Panel(
            "Cached tokens, as engines report",
            "short",
            {
                "expected": rate("kvd_selection_expected_cached_tokens_total"),
                "reported": rate("kvd_selection_reported_cached_tokens_total"),
            },
            "A second, of the requests whose callers report.",
        ),
        Panel(
            "Questions that matched",
            "percentunit",
            {"": share("kvd_questions_matched_total", "kvd_questions_total")},
        ),
        Panel(
            "Blocks that the best rank had more",
            "short",
            {"p90": quantile(0.9, "kvd_selection_regret_blocks")},
            "What was given up for balance, a choice.",
        ),
        Panel(
            "Selections by outcome",
            "ops",
            {"{{outcome}}": rate("kvd_selection_decisions_total", "outcome")},
        ),
    ],
    "How loaded are the ranks?": [
        Panel(
            "Tokens to prefill",
            "short",
            {"worker {{worker_id}}": value("kvd_selection_prefill_tokens", "worker_id")},
        ),
        Panel(
            "Blocks in use",
            "short",
            {"worker {{worker_id}}": value("kvd_selection_decode_blocks", "worker_id")},
        ),
        Panel(
            "Spread of the load",
            "short",
            {
                "tokens to prefill": spread("kvd_selection_prefill_tokens"),
                "blocks in use": spread("kvd_selection_decode_blocks"),
            },
            "The most loaded rank beside the mean of all: 1 is even.",
        ),
        Panel(
            "Reservations",
            "short",
            {
                "selection": value("kvd_selection_reservations"),
                "slot tracker": value("kvd_slots_requests"),
            },
        ),
        Panel(
            "Requests that expired",
            "ops",
            {
                "selection": rate("kvd_selection_expired_total"),
                "slot tracker": rate("kvd_slots_requests_expired_total"),
            },
        ),
        Panel("Ranks that are absent", "short", {"": value("kvd_selection_absent_ranks")}),
    ],
    "How soon are answers there?": [
        Panel(
            "Indexer, p99",
            "s",
            {
                "{{endpoint}}": quantile(
                    0.99, "dynamo_kvindexer_request_duration_seconds", "endpoint"
                )
            },
        ),
        Panel(
            "Selection service, p99",
            "s",
            {"{{endpoint}}": quantile(0.99, "kvd_selection_request_duration_seconds", "endpoint")},
        ),
        Panel(
            "Wait for a rank",
            "s",
            {
                "p50": quantile(0.5, "kvd_selection_wait_seconds"),
                "p99": quantile(0.99, "kvd_selection_wait_seconds"),
            },
        ),
        Panel(
            "Longest stretch of the event loop",
            "s",
            {"{{cause}}": value("kvd_loop_longest_stretch_seconds", "cause", of="max")},
            "Whatever comes meanwhile waits for its end. Of the last minute or two.",
        ),
    ],
    "Is anything full?": [
        Panel("Messages that wait", "short", {"": value("kvd_queued_messages")}),
        Panel("Selections that wait", "short", {"": value("kvd_selection_waiting")}),
        Panel(
            "Index",
            "short",
            {"blocks": value("kvd_index_blocks"), "limit": value("kvd_index_max_blocks")},
            "A limit of 0 is none.",
        ),
        Panel(
            "Refused at a bound",
            "ops",
            {
                "blocks": rate("kvd_index_refused_blocks_total"),
                "messages of engines": rate("kvd_listener_dropped_total"),
                "connections": rate("kvd_http_connections_refused_total"),
                "bodies": rate("kvd_http_bodies_refused_total"),
                "requests of the slot tracker": rate("kvd_slots_refused_total"),
            },
        ),
        Panel("Clients refused", "ops", {"{{reason}}": rate("kvd_http_refusals_total", "reason")}),
        Panel("Connections", "short", {"": value("kvd_http_connections_open")}),
    ],
    "What does the process use?": [
        Panel("Requests", "ops", {"": rate("kvd_http_requests_total")}),
        Panel(
            "Memory",
            "bytes",
            {
                "resident": value("process_resident_memory_bytes"),
                "index": value("kvd_index_bytes"),
                "free in the heap": value("kvd_heap_free_bytes"),
            },
        ),
        Panel("Messages that wait, in bytes", "bytes", {"": value("kvd_queued_bytes")}),
        Panel(
            "The event loop is busy with",
            "percentunit",
            {"{{cause}}": rate("kvd_loop_stretch_seconds_sum", "cause")},
            "Its share of a core, by what most of a stretch went into.",
        ),
    ],
    "Does state survive?": [
        Panel(
            "Server of the shared state", "bool_yes_no", {"": value("kvd_shared_state_connected")}
        ),
        Panel("Replicas that are behind", "short", {"": value("kvd_shared_state_behind")}),
        Panel("State not written", "ops", {"": rate("kvd_state_failures_total")}),
    ],
    "The gateway": [
        Panel("Engines", "short", {"{{standing}}": value("kvd_gateway_upstreams", "standing")}),
        Panel(
            "Requests by outcome",
            "ops",
            {"{{outcome}}": rate("kvd_gateway_relayed_requests_total", "outcome")},
        ),
        Panel("What decided", "ops", {"{{by}}": rate("kvd_gateway_decisions_total", "by")}),
        Panel(
            "Share of prompts that was cached",
            "percentunit",
            {"": share("kvd_gateway_matched_tokens_total", "kvd_gateway_prompt_tokens_total")},
            "As foreseen at the chosen engine.",
        ),
        Panel(
            "Cached tokens, as engines report",
            "short",
            {
                "expected": rate("kvd_gateway_reported_matched_tokens_total"),
                "reported": rate("kvd_gateway_reported_cached_tokens_total"),
            },
            "A second, of the requests whose engines report.",
        ),
        Panel("Requests refused", "ops", {"{{code}}": rate("kvd_gateway_refusals_total", "code")}),
    ],
}


def target(number: int, legend: str, expression: str) -> dict[str, Any]:
    named = f"{{{{instance}}}} {legend}".strip()
    return {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": named}


def panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for question, graphs in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": y}
        made.append({"type": "row", "title": question, "gridPos": place, "panels": []})
        y += 1
        for number, graph in enumerate(graphs):
            x = number * WIDTH % 24
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y + number * WIDTH // 24 * HEIGHT}
            made.append(
                {
                    "type": "timeseries",
                    "title": graph.title,
                    "description": graph.about,
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "gridPos": place,
                    "fieldConfig": {"defaults": {"unit": graph.unit, "min": 0}, "overrides": []},
                    "targets": [
                        target(number, legend, expression)
                        for number, (legend, expression) in enumerate(graph.lines.items())
                    ],
                }
            )
        y += (len(graphs) * WIDTH + 23) // 24 * HEIGHT
    return [{"id": number, **each} for number, each in enumerate(made, 1)]


def dashboard() -> dict[str, Any]:
    """Returns the dashboard, as Grafana 10 and later import it."""
    instances = "label_values(kvd_http_requests_total, instance)"
    return {
        "title": "kvd",
        "uid": "kvd",
        "tags": ["kvd", "llm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                {
                    "name": "instance",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "${datasource}"},
                    "query": {"query": instances, "refId": "instances"},
                    "refresh": 2,
                    "multi": True,
                    "includeAll": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels(),
    }


if __name__ == "__main__":
    print(json.dumps(dashboard(), indent=1))
