"""The Grafana dashboard and the alert rules: what they name is there and means what it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.support.exposition import labels, parse
from tests.support.kvds import Kvd
from tests.support.ports import find_free_port
from tests.support.processes import REPOSITORY

RULES = REPOSITORY / "packaging/prometheus/kvd-alerts.yml"
CASES = REPOSITORY / "packaging/prometheus/kvd-alerts.test.yml"
DASHBOARD = REPOSITORY / "packaging/grafana/kvd.json"

# Of PromQL, of Prometheus, and labels that it adds itself.
FUNCTIONS = {"by", "histogram_quantile", "increase", "label_values", "rate", "sum"}
OF_PROMETHEUS = {"up"}
ADDED = {"instance", "job"}

SELECTOR = re.compile(r"([a-z_]\w*)\s*(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(=~|=)"([^"]*)"')


def expressions() -> Iterator[str]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    said = json.loads(DASHBOARD.read_text())
    for panel in said["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    yield from (each["query"]["query"] for each in said["templating"]["list"][1:])


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """The labels of all samples of a kvd that has everything, by name."""
    folder = tmp_path_factory.mktemp("kvd")
    fleet = folder / "fleet.toml"
    fleet.write_text("")
    gateway = find_free_port()
    flags = [f"--fleet-file={fleet}", f"--gateway-bind=127.0.0.1:{gateway}"]
    flags += ["--upstreams=http://127.0.0.1:1", f"--state-url=redis://127.0.0.1:{find_free_port()}"]
    kvd = Kvd(folder, *flags)
    found: dict[str, list[dict[str, str]]] = {}
    try:
        kvd.start()
        worker = {"worker_id": 1, "model_name": "m", "block_size": 4, "endpoint": "http://x"}
        assert kvd.post("selection", "/workers", worker).status_code == 201
        for port in (*kvd.ports.values(), gateway):
            answer = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, verify=False)
            for key in parse(answer.text):
                found.setdefault(key.partition("{")[0], []).append(labels(key))
            for name in re.findall(r"^# TYPE (\w+)", answer.text, re.MULTILINE):
                found.setdefault(name, [])
    finally:
        kvd.close()
    return found


@pytest.mark.parametrize("expression", sorted(set(expressions())))
def test_metrics_and_labels_are_there(
    samples: dict[str, list[dict[str, str]]], expression: str
) -> None:
    plain = re.sub(r"\[[^]]*\]", "", expression)  # ranges
    grouped = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", plain))))
    plain = re.sub(r"by \([^)]*\)", "", plain)
    names = [match for match in SELECTOR.finditer(plain) if match[1] not in FUNCTIONS | ADDED]
    assert names
    for match in names:
        name = match[1]
        if name in OF_PROMETHEUS:
            continue
        assert name in samples, name
        for label, operator, said in MATCHER.findall(match[2] or ""):
            if label not in ADDED:
                values = {each[label] for each in samples[name]}
                assert values >= set(said.split("|") if operator == "=~" else [said])
        known = {label for each in samples[name] for label in each}
        assert not samples[name] or grouped - ADDED <= known, (name, grouped)


def test_the_dashboard_is_up_to_date() -> None:
    command = [sys.executable, str(REPOSITORY / "packaging/dashboard.py")]
    made = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert made == DASHBOARD.read_text()


def test_alerts_lead_to_sections_of_the_operations_page() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    for rule in yaml.safe_load(RULES.read_text())["groups"][0]["rules"]:
        where, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert where == "docs/operations.md"
        assert anchor in anchors, anchor


def test_each_alert_has_a_case() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
    cases = yaml.safe_load(CASES.read_text())["tests"]
    assert [rule["alert"] for rule in rules] == [case["name"] for case in cases]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("command", [("check", RULES), ("test", CASES)])
def test_the_rules_by_promtool(command: tuple[str, Path]) -> None:
    verb, path = command
    done = subprocess.run(["promtool", verb, "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
