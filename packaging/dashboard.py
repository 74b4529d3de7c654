#!/usr/bin/env python3
"""Writes the Grafana dashboard: `python packaging/dashboard.py > packaging/grafana/kvd.json`.

A row of the dashboard is a question, a panel a figure that answers it. Metrics are those of any
kvd; what a process does not have, such as a gateway, stays empty.
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


def rate(name: str, by: str = "instance", labels: str = "") -> str:
    selector = f"{HERE},{labels}" if labels else HERE
    return f"sum by ({by}) (rate({name}{{{selector}}}[$__rate_interval]))"


def value(name: str, by: str = "instance", labels: str = "") -> str:
    selector = f"{HERE},{labels}" if labels else HERE
    return f"sum by ({by}) ({name}{{{selector}}})"


def quantile(share: float, name: str) -> str:
    buckets = rate(f"{name}_bucket", "le")
    return f"histogram_quantile({share}, {buckets})"


def share(part: str, whole: str) -> str:
    return f"{rate(part)} / {rate(whole)}"


ROWS: dict[str, list[Panel]] = {
    "Can the index be believed?": [
        Panel("Streams", "short", {"{{state}}": value("kvd_streams", "state")}),
        Panel("Quiet engines", "short", {"{{why}}": value("kvd_quiet_streams", "why")}),
        Panel("Batches lost", "short", {"{{instance}}": rate("kvd_listener_lost_total")}),
        Panel("Events", "ops", {"{{type}}": rate("kvd_events_total", "type")}),
        Panel(
            "Events without effect",
            "ops",
            {"{{reason}}": rate("kvd_events_ignored_total", "reason")},
        ),
        Panel("Models that never match", "short", {"{{instance}}": value("kvd_unmatched_models")}),
    ],
    "Is routing good?": [
        Panel(
            "Share of prompts that were cached",
            "percentunit",
            {
                "foreseen": share(
                    "kvd_selection_expected_cached_tokens_total",
                    "kvd_selection_prompt_tokens_total",
                ),
                "reported by engines": share(
                    "kvd_selection_reported_cached_tokens_total",
                    "kvd_selection_prompt_tokens_total",
                ),
            },
        ),
        Panel(
            "Questions that matched",
            "percentunit",
            {"{{instance}}": share("kvd_questions_matched_total", "kvd_questions_total")},
        ),
        Panel(
            "Blocks that the best rank had more",
            "short",
            {"p90": quantile(0.9, "kvd_selection_regret_blocks")},
            "What was given up for balance, a choice.",
        ),
        Panel("Choices", "ops", {"{{phase}}": rate("kvd_selection_choices_total", "phase")}),
        Panel(
            "Wait for a rank",
            "s",
            {
                "p50": quantile(0.5, "kvd_selection_wait_seconds"),
                "p99": quantile(0.99, "kvd_selection_wait_seconds"),
            },
        ),
        Panel("Selections that wait", "short", {"{{instance}}": value("kvd_selection_waiting")}),
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
            "Reservations",
            "short",
            {
                "selection": value("kvd_selection_reservations"),
                "slot tracker": value("kvd_slots_requests"),
            },
        ),
        Panel(
            "Ranks that are absent", "short", {"{{instance}}": value("kvd_selection_absent_ranks")}
        ),
        Panel(
            "Requests that expired",
            "ops",
            {
                "selection": rate("kvd_selection_expired_total"),
                "slot tracker": rate("kvd_slots_requests_expired_total"),
            },
        ),
        Panel(
            "Prompt tokens a second, as learned",
            "short",
            {"worker {{worker_id}}": value("kvd_selection_prefill_tokens_per_second", "worker_id")},
        ),
    ],
    "Is the process well?": [
        Panel("Requests", "ops", {"{{instance}}": rate("kvd_http_requests_total")}),
        Panel("Memory", "bytes", {"{{instance}}": value("process_resident_memory_bytes")}),
        Panel("Messages that wait", "short", {"{{instance}}": value("kvd_queued_messages")}),
        Panel(
            "Index",
            "short",
            {"blocks": value("kvd_index_blocks"), "limit": value("kvd_index_max_blocks")},
        ),
        Panel("Clients refused", "ops", {"{{reason}}": rate("kvd_http_refusals_total", "reason")}),
        Panel("Connections", "short", {"{{instance}}": value("kvd_http_connections_open")}),
    ],
    "Does state survive?": [
        Panel(
            "Server of the shared state",
            "bool_yes_no",
            {"{{instance}}": value("kvd_shared_state_connected")},
        ),
        Panel(
            "Replicas that are behind", "short", {"{{instance}}": value("kvd_shared_state_behind")}
        ),
        Panel("State not written", "ops", {"{{instance}}": rate("kvd_state_failures_total")}),
    ],
    "The gateway": [
        Panel("Engines", "short", {"{{standing}}": value("kvd_gateway_upstreams", "standing")}),
        Panel("Requests", "ops", {"{{instance}}": rate("kvd_gateway_relay_begun_total")}),
        Panel(
            "Share of prompts that were cached",
            "percentunit",
            {
                "foreseen": share(
                    "kvd_gateway_matched_tokens_total", "kvd_gateway_prompt_tokens_total"
                )
            },
        ),
    ],
}


def target(number: int, legend: str, expression: str) -> dict[str, Any]:
    return {"refId": chr(ord("A") + number), "expr": expression, "legendFormat": legend}


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
