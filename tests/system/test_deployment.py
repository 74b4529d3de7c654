"""Unit files, container and manifest against the settings they have to agree with."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
import zmq

from kvd.cli.main import main
from kvd.config.binds import TcpBind
from kvd.config.errors import StartError
from kvd.config.parsers import OFF
from kvd.config.settings import SETTINGS
from kvd.config.sources import FACE_BINDS
from kvd.fleet_file import parse as fleetfile
from kvd.http.limits import HttpLimits
from kvd.persistence.store import STOP_S
from kvd.platform.descriptors import ENOUGH
from kvd.wire.egress import EgressPolicy
from kvd.wire.endpoints import Addresses
from tests.support import http_client
from tests.support.ports import find_free_port
from tests.support.processes import REPOSITORY
from tests.support.running import running, running_kvd

PACKAGING = REPOSITORY / "packaging"
SERVICE = REPOSITORY / "systemd" / "kvd.service"
GATEWAY = REPOSITORY / "systemd" / "kvd-gateway.service"
SOCKET = REPOSITORY / "systemd" / "kvd.socket"
MOST_EXPOSED = 1.2

DEFAULTS = {each.name: each.default for each in SETTINGS}
# The faces that `kvd serve` has by default; the gateway needs to be given its engines.
SERVED = [name for name in FACE_BINDS if DEFAULTS[name] is not OFF]
# By the name of the face, such as slot-tracker.
BINDS = {name.removesuffix("_bind").replace("_", "-"): DEFAULTS[name] for name in SERVED}
FIRST = {face: binds.each[0] for face, binds in BINDS.items()}
PORTS = {face: bind.port for face, bind in FIRST.items() if isinstance(bind, TcpBind)}


def values_of(path: Path, key: str) -> list[str]:
    """Returns what a unit file says for a key, in order."""
    return re.findall(rf"^{key}=(.*)$", path.read_text(), re.MULTILINE)


# ---- systemd


def test_the_socket_unit_has_the_default_address_of_every_face() -> None:
    assert values_of(SOCKET, "ListenStream") == [str(bind) for bind in BINDS.values()]


def test_the_service_grants_what_the_daemon_wants() -> None:
    (stop,), (files,) = values_of(SERVICE, "TimeoutStopSec"), values_of(SERVICE, "LimitNOFILE")
    assert int(stop) > HttpLimits().graceful_s + STOP_S
    assert int(files) >= ENOUGH
    assert values_of(SERVICE, "WatchdogSignal") == ["SIGABRT"]  # leaves a stack in the journal
    (start,) = values_of(SERVICE, "ExecStart")
    assert start == "/usr/bin/kvd serve --config /etc/kvd/kvd.toml"
    assert values_of(SERVICE, "ExecReload") == ["/usr/bin/kvd reload"]
    assert values_of(SERVICE, "RuntimeDirectory") == ["kvd"]  # where reload finds kvd


def test_the_service_comes_back_unless_it_cannot() -> None:
    assert values_of(SERVICE, "Restart") == ["on-failure"]
    (never,) = values_of(SERVICE, "RestartPreventExitStatus")
    assert never.split() == ["2", str(StartError.exit_code)]
    (pause,), (most,), (within,) = (
        values_of(SERVICE, key)
        for key in ("RestartSec", "StartLimitBurst", "StartLimitIntervalSec")
    )
    # systemd gives up if starts fail within seconds, but never if each crash takes a minute.
    assert 10 * int(pause) * int(most) < int(within) < 60 * int(most)


def test_the_gateways_service_is_confined_as_that_of_kvd() -> None:
    """The units agree, except in what they run, and when and how they start, reload and end."""
    own = {"Description", "ConditionPathExists", "After", "ExecStart", "ExecReload", "KillMode"}
    own |= {"RuntimeDirectory", "RuntimeDirectoryPreserve", "StateDirectory"}
    lines = [
        [line for line in unit.read_text().splitlines() if line and not line.startswith("#")]
        for unit in (SERVICE, GATEWAY)
    ]
    kvd, gateway = ([each for each in unit if each.split("=")[0] not in own] for unit in lines)
    assert gateway == kvd
    assert values_of(GATEWAY, "ExecStart") == [
        "/usr/bin/kvd gateway --config /etc/kvd/gateway.toml"
    ]
    # Only the parent gets the first signal: it has the gateways drain before their kvd ends.
    assert values_of(GATEWAY, "KillMode") == ["mixed"]


def test_the_service_is_hardly_exposed() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze")
    command = ["systemd-analyze", "security", "--offline=true", str(SERVICE)]
    shown = subprocess.run(command, capture_output=True, text=True)
    if "unrecognized option" in shown.stderr:
        pytest.skip("this systemd-analyze needs a running systemd")
    found = re.search(r"exposure level for kvd.service: ([0-9.]+)", shown.stdout)
    assert found is not None, shown.stderr
    assert float(found[1]) <= MOST_EXPOSED


def test_ports_and_sockets_open_under_what_the_service_forbids(
    tmp_path: Path, certificate: Path
) -> None:
    """libzmq aborts if it may not list interfaces, and no file's owner may be changed."""
    http, https, replicas = find_free_port(), find_free_port(), find_free_port()
    public, secret = (key.decode() for key in zmq.curve_keypair())
    for name, text in (
        ("secret", secret),
        ("keys", public),
        ("tokens", "operator read 0123456789abcdef\n"),
        ("fleet.toml", ""),
    ):
        (tmp_path / name).write_text(text)
    sock = tmp_path / "socket"
    flags = {
        "indexer-bind": f"127.0.0.1:{http},tls:127.0.0.1:{https},unix:{sock}",
        "slot-tracker-bind": "127.0.0.1:0",
        "selection-bind": "127.0.0.1:0",
        "conductor-bind": "127.0.0.1:0",
        "tls-certfile": certificate / "cert.pem",
        "tls-keyfile": certificate / "key.pem",
        "tokens-file": tmp_path / "tokens",
        "unix-socket-group": os.getgid(),
        "fleet-file": tmp_path / "fleet.toml",
        "replica-sync-port": replicas,
        "replica-sync-host": "localhost",
        "curve-secret-key-file": tmp_path / "secret",
        "replica-sync-client-keys": tmp_path / "keys",
    }
    arguments = [f"--{name}={value}" for name, value in flags.items()]
    sandbox = [sys.executable, str(REPOSITORY / "tests/support/unit_sandbox.py")]
    with running(tmp_path, http, "serve", *arguments, under=sandbox):
        for port in (https, replicas):
            socket.create_connection(("127.0.0.1", port)).close()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(sock))


# ---- containers


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """The objects of the manifest by their kind, and the fleet's as `fleet`."""
    found = list(yaml.safe_load_all((PACKAGING / "kubernetes.yaml").read_text()))
    (fleet,) = (each for each in found if each["metadata"]["name"] == "kvd-fleet")
    return {each["kind"]: each for each in found if each is not fleet} | {"fleet": fleet}


def container(manifest: dict[str, Any], name: str = "kvd") -> dict[str, Any]:
    pod = manifest.get("spec", {}).get("template", manifest)["spec"]
    all_ = [*pod.get("initContainers", ()), *pod["containers"]]
    (one,) = (each for each in all_ if each["name"] == name)
    return dict(one)


def test_ports_are_those_of_the_settings(manifests: dict[str, Any]) -> None:
    ports = container(manifests["Deployment"])["ports"]
    assert {each["name"]: each["containerPort"] for each in ports} == PORTS
    ports = manifests["Service"]["spec"]["ports"]
    assert {each["name"]: each["port"] for each in ports} == PORTS
    assert all(each["targetPort"] == each["name"] for each in ports)
    (rule,) = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert [each["port"] for each in rule["ports"]] == list(PORTS)
    (exposed,) = re.findall(r"^EXPOSE (.*)$", (PACKAGING / "Containerfile").read_text(), re.M)
    assert list(map(int, exposed.split())) == list(PORTS.values())


def test_the_configuration_is_taken(manifests: dict[str, Any], tmp_path: Path) -> None:
    (name,) = (text for text in manifests["ConfigMap"]["data"] if text.endswith(".toml"))
    text = manifests["ConfigMap"]["data"][name]
    tokens = tmp_path / "tokens"
    tokens.write_text("operator read,lifecycle,admin 0123456789abcdef\n")
    (tokens_file,) = re.findall(r'^tokens_file = "(.*)"$', text, re.MULTILINE)
    path = tmp_path / name
    (followed,) = re.findall(r'^fleet_file = "(.*)"$', text, re.MULTILINE)
    fleet = tmp_path / Path(followed).name
    fleet.write_text(manifests["fleet"]["data"][fleet.name])
    path.write_text(text.replace(tokens_file, str(tokens)).replace(followed, str(fleet)))
    assert main(["config", "check", "--config", str(path)]) == 0
    heard: dict[str, list[Any]] = {"indexer": [], "selection": []}
    for each in fleetfile.load(fleet, EgressPolicy()):
        heard[each.table].append(
            each.wanted.addresses(0)
            if each.table == "selection"
            else Addresses(each.wanted.endpoint, each.wanted.replay_endpoint)
        )
    assert heard["indexer"] == heard["selection"]  # so each has one listener
    binds = dict(re.findall(r'^(\w+_bind) = "0\.0\.0\.0:(\d+)"$', text, re.MULTILINE))
    assert list(binds) == SERVED
    assert list(map(int, binds.values())) == list(PORTS.values())
    one = container(manifests["Deployment"])
    mount, secret, map_ = one["volumeMounts"]
    assert str(Path(tokens_file).parent) == secret["mountPath"]
    assert str(Path(followed).parent) == map_["mountPath"] and "subPath" not in map_
    assert one["args"] == ["serve", "--config", f"{mount['mountPath']}/{name}"]


def test_stopping_gets_the_time_it_needs(manifests: dict[str, Any]) -> None:
    pods = manifests["Pod"]["spec"], manifests["Deployment"]["spec"]["template"]["spec"]
    for pod in pods:
        assert pod["terminationGracePeriodSeconds"] > HttpLimits().graceful_s


PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_probes_are_answered(manifests: dict[str, Any], tmp_path: Path) -> None:
    probed = container(manifests["Deployment"])
    gets = {(probed[name]["httpGet"]["port"], probed[name]["httpGet"]["path"]) for name in PROBES}
    (command,) = (
        container(manifests["Pod"])[name]["exec"]["command"]
        for name in PROBES
        if name in container(manifests["Pod"])
    )
    for port, path in re.findall(r"http://127\.0\.0\.1:(\d+)(/\w+)", command[-1]):
        gets.add((next(face for face in PORTS if PORTS[face] == int(port)), path))
    commands = {"indexer": "indexer", "slot-tracker": "slot-tracker", "selection": "select-service"}
    for face in {face for face, _ in gets}:
        with running_kvd(tmp_path, face=commands[face]) as server:
            for _, path in (each for each in gets if each[0] == face):
                url = f"{server.base_url}{path}"
                assert http_client.get(url).status_code == 200, url


def test_nobody_is_root(manifests: dict[str, Any]) -> None:
    (user,) = re.findall(r"^USER (\d+):", (PACKAGING / "Containerfile").read_text(), re.M)
    for manifest in (manifests["Deployment"], manifests["Pod"]):
        pod = manifest["spec"].get("template", manifest)["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == int(user) > 0
        assert container(manifest)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


# ---- scripts


@pytest.mark.parametrize("name", ["build", "test"])
def test_scripts_are_well_formed(name: str) -> None:
    subprocess.run(["bash", "-n", PACKAGING / name], check=True)


@pytest.mark.parametrize("path", sorted((PACKAGING / "debian").glob("kvd.p*")), ids=str)
def test_maintainer_scripts_are_well_formed(path: Path) -> None:
    subprocess.run(["sh", "-n", path], check=True)
    assert "#DEBHELPER#" in path.read_text() and "\nset -e\n" in path.read_text()


def test_no_registry_is_named() -> None:
    files = (path for path in PACKAGING.rglob("*") if path.is_file() and path.suffix != ".pyc")
    named = re.compile(r"pypi|pythonhosted|index-url", re.IGNORECASE)
    assert not [path for path in files if named.search(path.read_text())]
