"""The Grafana dashboard and the alert rules: the series and labels that they name exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import trio
import yaml

from examples.engine.options import EngineOptions
from tests.support import http_client
from tests.support.exposition import labels, parse
from tests.support.gateways import engines, gateway_of
from tests.support.kvds import Kvd
from tests.support.ports import find_free_port
from tests.support.processes import REPOSITORY, Server, clean_environment
from tests.support.promql import Query, Selector, read

RULES = REPOSITORY / "packaging/prometheus/kvd-alerts.yml"
CASES = REPOSITORY / "packaging/prometheus/kvd-alerts.test.yml"
DASHBOARD = REPOSITORY / "packaging/grafana/kvd.json"

ADDED = {"instance", "job"}  # labels that Prometheus adds
LEGEND = re.compile(r"\{\{\s*(\w+)\s*\}\}")
ANNOTATION = re.compile(r"\$labels\.(\w+)")

Samples = dict[str, list[dict[str, str]]]  # the labels of all samples, by name

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed"
)


class Asked(NamedTuple):
    """An expression, and the labels that its legend or its annotations show."""

    expression: str
    shown: frozenset[str] = frozenset()


def rules() -> list[dict[str, Any]]:
    return [
        rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
    ]


def targets() -> Iterator[dict[str, str]]:
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from panel.get("targets", ())


def expressions() -> Iterator[Asked]:
    for rule in rules():
        annotations = " ".join(rule["annotations"].values())
        yield Asked(rule["expr"], frozenset(ANNOTATION.findall(annotations)))
    for target in targets():
        yield Asked(target["expr"], frozenset(LEGEND.findall(target["legendFormat"])))
    for each in json.loads(DASHBOARD.read_text())["templating"]["list"][1:]:
        yield Asked(each["query"]["query"])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """The metrics of a kvd with every feature, and of gateway processes whose kvd is away."""
    texts = [*serve_texts(tmp_path_factory.mktemp("kvd"))]
    texts.append(trio.run(gateway_text, tmp_path_factory.mktemp("gateway")))
    found: Samples = {}
    for text in texts:
        for key in parse(text):
            found.setdefault(key.partition("{")[0], []).append(labels(key))
    return found


def serve_texts(folder: Path) -> Iterator[str]:
    """Yields the metrics of each face, after a booking and its report."""
    fleet = folder / "fleet.toml"
    fleet.write_text("")
    gateway = find_free_port()
    flags = [f"--fleet-file={fleet}", f"--gateway-bind=127.0.0.1:{gateway}"]
    flags += ["--upstreams=http://127.0.0.1:1", f"--state-url=redis://127.0.0.1:{find_free_port()}"]
    kvd = Kvd(folder, *flags, "--no-router-use-kv-events")
    try:
        kvd.start()
        worker = {"worker_id": 1, "model_name": "m", "block_size": 4, "endpoint": "http://x"}
        assert kvd.post("selection", "/workers", worker).status_code == 201
        asked = {"model_name": "m", "token_ids": [*range(8)], "reservation_id": "a"}
        assert kvd.post("selection", "/select_and_reserve", asked).status_code == 200
        report = {"prompt_tokens": 8, "cached_tokens": 0}
        assert kvd.post("selection", "/reservations/a/report", report).status_code == 200
        for port in (*kvd.ports.values(), gateway):
            url = f"http://127.0.0.1:{port}/metrics"
            yield http_client.get(url).text
    finally:
        kvd.close()


async def gateway_text(folder: Path) -> str:
    """Returns the metrics of gateway processes that have answered one request and refused one."""
    servers: list[Server] = []

    def start(*flags: str, face: str) -> Server:
        port = find_free_port()
        command = [sys.executable, "-m", "kvd", face, "--port", str(port), *flags]
        servers.append(Server(command, folder, port, clean_environment()))
        servers[-1].wait_healthy()
        return servers[-1]

    flags = ["--processes", "2", "--kvd", f"http://127.0.0.1:{find_free_port()}"]
    try:
        async with (
            engines(EngineOptions()) as running,
            gateway_of(start, [each.url for each in running], flags) as client,
        ):
            assert (await client.chat("a")).headers["x-kvd-decision"] == "fallback"
            assert (await client.chat("a", model="unknown")).status == 404
            return (await client.get("/metrics")).body.decode()
    finally:
        for server in servers:
            server.stop()


def unknown(asked: Asked, samples: Samples) -> list[str]:
    """Returns the names, labels and values in an expression that no sample has."""
    query = read(asked.expression)
    wrong = [each for selector in query.selectors for each in unmatched(selector, samples)]
    return wrong + unseen_labels(query, asked.shown, samples)


def unmatched(selector: Selector, samples: Samples) -> Iterator[str]:
    if selector.name == "up":  # Prometheus' own
        return
    if selector.name not in samples:
        yield selector.name
    for label, operator, text in selector.matchers:
        if label not in ADDED:
            values = {each.get(label) for each in samples.get(selector.name, [])}
            wanted = text.split("|") if "~" in operator else [text]
            yield from (f"{label}={each}" for each in wanted if each not in values)


def unseen_labels(query: Query, shown: frozenset[str], samples: Samples) -> list[str]:
    """Returns the labels in `by` or `shown` that the series, or the result, do not have."""
    each_has = [set().union(*samples.get(one.name, [])) for one in query.selectors]
    known = ADDED.union(set.intersection(*each_has))
    kept = set.union(*query.grouped) if query.grouped else known
    named = shown.union(*query.grouped)
    return sorted((named - known) | (shown - kept))


def test_metrics_and_labels_are_there(samples: Samples) -> None:
    for asked in set(expressions()):
        assert read(asked.expression).selectors, asked
        assert unknown(asked, samples) == [], asked


def test_what_is_not_there_is_found() -> None:
    samples: Samples = {"a": [{"x": "1", "le": "2"}], "b": [{}]}
    for expression, wrong in (
        ('sum by (x) (rate(a{x=~"1"}[5m])) / 2', []),
        ("c > 0", ["c"]),
        ('a{x="1", y!="2"}', ["y=2"]),
        ('a{x!~"1|3"}', ["x=3"]),
        ("sum by (z) (a)", ["z"]),
        ("label_values(b, x)", ["x"]),
        ("sum by (x) (a) / sum by (x) (b)", ["x"]),
    ):
        assert unknown(Asked(expression), samples) == wrong, expression
    assert unknown(Asked("sum by (le) (a)", frozenset({"x"})), samples) == ["x"]
    for expression in (
        "a offset 5m",
        "avg_over_time(a[5m])",
        "a{x=1}",
        "a[5m:1m]",
        "sum without (x) (a)",
    ):
        with pytest.raises(ValueError):
            read(expression)


def test_the_dashboard_is_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "packaging/dashboard.py")]
    made = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert made == DASHBOARD.read_text()


def test_alerts_lead_to_sections_of_the_operations_page() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    for rule in rules():
        assert {"summary", "description", "runbook"} == rule["annotations"].keys()
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        where, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert where == "docs/operations.md"
        assert anchor in anchors, anchor


def test_each_alert_has_a_case() -> None:
    cases = yaml.safe_load(CASES.read_text())["tests"]
    assert [rule["alert"] for rule in rules()] == [case["name"] for case in cases]


@needs_promtool
@pytest.mark.parametrize("command", [("check", RULES), ("test", CASES)])
def test_the_rules_by_promtool(command: tuple[str, Path]) -> None:
    verb, path = command
    done = subprocess.run(["promtool", verb, "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_reads_the_dashboard(tmp_path: Path) -> None:
    variables = {"$__rate_interval": "5m", "$instance": ".*"}
    queries = [target["expr"] for target in targets()]
    for name, text in variables.items():
        queries = [each.replace(name, text) for each in queries]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(queries)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
