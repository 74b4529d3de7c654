"""Every face's members that name an address, with addresses that kvd must not connect to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvd.cli.main import main
from kvd.wire.hosts import everywhere
from tests.support import exposition
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.running import running

FACES = ("indexer", "slot_tracker", "selection", "conductor")

# Hosts, in brackets where they are IPv6. More of them: tests/unit/wire/test_outgoing.py.
HOSTS = [
    "169.254.169.254",
    "100.100.100.200",
    "8.8.8.8",
    "0.0.0.0",
    "255.255.255.255",
    "224.0.0.1",
    "127.1",
    "0x7f000001",
    "0177.0.0.1",
    "2130706433",
    "127.0.0.1.",
    "[::]",
    "[fe80::1]",
    "[fe80::1%eth0]",
    "[fd00:ec2::254]",
    "[ff02::1]",
    "[::ffff:169.254.169.254]",
    "[2002:a9fe:a9fe::]",
    "[64:ff9b::a9fe:a9fe]",
    "[2606:4700::1111]",
    "[127.0.0.1]",
    "user@10.0.0.1",
    "10.0.0.1/x",
    "10.0.0.1#x",
]

# Whole endpoints that mean something else to libzmq than they seem to.
ENDPOINTS = [
    "tcp://10.0.0.1:70000",
    "tcp://10.0.0.1:-1",
    "tcp://10.0.0.1:1\0.example",
    "tcp://10.0.0.2:0;10.0.0.1:5557",
    "tcp://10.0.0.1 :5557",
    "tcp://10.0.0.1:5557 ",
    "pgm://10.0.0.1:5557",
    "udp://10.0.0.1:5557",
    "ws://10.0.0.1:5557",
    "vmci://1:2",
    "http://10.0.0.1:5557",
    "file:///etc/passwd",
    "//10.0.0.1:5557",
]

GOOD = "tcp://127.0.0.1:1"

RANK = {"instance_id": 1, "model_name": "m", "block_size": 16}
PUBLISHER = {
    "instance_id": "p",
    "type": "vLLM",
    "model": "m",
    "block_size": 16,
    "dp_rank": 0,
}
STORE = {**PUBLISHER, "type": "Mooncake"}
WORKER = {"worker_id": 1, "model_name": "m", "endpoint": "http://169.254.169.254", "block_size": 16}

# Face, method, path, a body that contains ADDRESS, and whether the address is a URL.
ADDRESS = "{address}"
PLACES: list[tuple[str, str, str, dict[str, Any], bool]] = [
    ("indexer", "POST", "/register", {**RANK, "endpoint": ADDRESS}, False),
    (
        "indexer",
        "POST",
        "/register",
        {**RANK, "endpoint": GOOD, "replay_endpoint": ADDRESS},
        False,
    ),
    ("indexer", "POST", "/register_peer", {"url": ADDRESS}, True),
    ("slot_tracker", "POST", "/replica_sync/register_peer", {"endpoint": ADDRESS}, False),
    ("selection", "POST", "/replica_sync/register_peer", {"endpoint": ADDRESS}, False),
    ("selection", "POST", "/workers", {**WORKER, "kv_events_endpoint": ADDRESS}, False),
    ("selection", "POST", "/workers", {**WORKER, "kv_events_endpoints": {"0": ADDRESS}}, False),
    ("selection", "POST", "/workers", {**WORKER, "replay_endpoint": ADDRESS}, False),
    (
        "selection",
        "PUT",
        "/workers",
        {"model_name": "m", "workers": [{**WORKER, "kv_events_endpoint": ADDRESS}]},
        False,
    ),
    ("selection", "PATCH", "/workers/7", {"kv_events_endpoint": ADDRESS}, False),
    ("selection", "PATCH", "/workers/7", {"replay_endpoint": ADDRESS}, False),
    ("conductor", "POST", "/register", {**PUBLISHER, "endpoint": ADDRESS}, False),
    (
        "conductor",
        "POST",
        "/register",
        {**PUBLISHER, "endpoint": GOOD, "replay_endpoint": ADDRESS},
        False,
    ),
    ("conductor", "POST", "/register", {**STORE, "endpoint": ADDRESS}, False),
]
LISTINGS = {
    "indexer": ("/workers", "/peers"),
    "slot_tracker": ("/workers", "/replica_sync/peers"),
    "selection": ("/workers", "/replica_sync/peers"),
    "conductor": ("/services",),
}

Clients = dict[str, Client]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clients]:
    ports = {face: find_free_port() for face in FACES}
    binds = [f"--{face.replace('_', '-')}-bind=127.0.0.1:{port}" for face, port in ports.items()]
    sync = f"--replica-sync-port={find_free_port()}"
    folder = tmp_path_factory.mktemp("ssrf")
    with running(folder, ports["indexer"], "serve", *binds, sync):
        clients = {face: Client(f"http://127.0.0.1:{port}") for face, port in ports.items()}
        known = {**WORKER, "worker_id": 7, "kv_events_endpoint": GOOD}
        assert clients["selection"].post("/workers", json=known).status_code == 201
        yield clients
        for client in clients.values():
            client.close()


def listed(clients: Clients) -> str:
    """Returns all listings, without listeners, whose connections change by themselves."""
    found = [clients[face].get(path) for face, paths in LISTINGS.items() for path in paths]
    return json.dumps([json.loads(each.text, object_hook=_without_listeners) for each in found])


def _without_listeners(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "listeners"}


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} {place[1]} {place[2]}")
def test_nothing_is_registered_that_may_not_be_connected_to(
    clients: Clients, place: tuple[str, str, str, dict[str, Any], bool]
) -> None:
    face, method, path, body, is_url = place
    before = listed(clients)
    refused = count(clients[face])
    for host in HOSTS:
        address = f"http://{host}:80/" if is_url else f"tcp://{host}:5557"
        if is_url and host in ("user@10.0.0.1", "10.0.0.1/x", "10.0.0.1#x", "[127.0.0.1]"):
            continue  # valid in URLs, which only the configuration can have kvd fetch
        refuse(clients, face, method, path, body, address)
    assert count(clients[face]) >= refused + 15
    if not is_url:
        for address in ENDPOINTS:
            refuse(clients, face, method, path, body, address)
    assert listed(clients) == before


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} {place[1]} {place[2]}")
@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_where_others_listen_is_told_from_where_they_are(
    clients: Clients, place: tuple[str, str, str, dict[str, Any], bool], host: str
) -> None:
    face, method, path, body, is_url = place
    address = f"http://{host}:80/" if is_url else f"tcp://{host}:5557"
    members = json.loads(json.dumps(body).replace(json.dumps(ADDRESS), json.dumps(address)))
    before = listed(clients)
    response = clients[face].request(method, path, json=members)
    assert response.status_code == 400, response.text
    assert everywhere(host.strip("[]")) in response.json()["error"]
    assert listed(clients) == before


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place[0]} {place[1]} {place[2]}")
def test_no_password_is_shown_to_others(
    clients: Clients, place: tuple[str, str, str, dict[str, Any], bool]
) -> None:
    face, method, path, body, is_url = place
    address = f"{'http' if is_url else 'tcp'}://me:secret@10.0.0.1:5557"
    members = json.loads(json.dumps(body).replace(json.dumps(ADDRESS), json.dumps(address)))
    if "worker_id" in members:
        members["endpoint"] = "http://me:secret@10.0.0.1"  # its HTTP address is listed, too
    response = clients[face].request(method, path, json=members)
    assert "secret" not in response.text and "secret" not in listed(clients)
    if face == "selection":
        undo(clients)


def refuse(
    clients: Clients, face: str, method: str, path: str, body: dict[str, Any], address: str
) -> None:
    members = json.loads(json.dumps(body).replace(json.dumps(ADDRESS), json.dumps(address)))
    response = clients[face].request(method, path, json=members)
    answer = response.json()
    if face == "selection" and response.status_code in (200, 201, 422):
        # As in Dynamo, the selection service accepts such a worker, and shows this as a reason.
        assert "outgoing_allow" not in response.text, (address, answer)
        assert "invalid ZMQ endpoint" in response.text, (address, answer)
        undo(clients)
        return
    assert response.status_code == 400, (address, answer)
    assert answer["error"].startswith(("invalid ZMQ endpoint", "invalid replay", "invalid URL"))
    if face == "conductor":
        named = next(name for name, value in body.items() if value == ADDRESS)
        assert (answer["reason"], answer["field"]) == ("invalid_value", named)


def undo(clients: Clients) -> None:
    """Removes workers that were accepted as incomplete, and registers the known one again."""
    selection = clients["selection"]
    selection.delete("/workers/1")
    selection.delete("/workers/7")
    known = {**WORKER, "worker_id": 7, "kv_events_endpoint": GOOD}
    assert selection.post("/workers", json=known).status_code == 201


def count(client: Client) -> float:
    samples = exposition.parse(client.get("/metrics").text)
    return samples['kvd_outgoing_refused_total{at="named"}']


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers=1=tcp://169.254.169.254:80", "--block-size=16"],
        ["--workers=1=tcp://8.8.8.8:80", "--block-size=16"],
        ["--peers=http://169.254.169.254/"],
        ["--replica-sync-port=5600", "--replica-sync-peers=tcp://[fe80::1]:5600"],
        ["--workers=1=ipc:///run/x", "--block-size=16", "--outgoing-allow=private"],
    ],
)
def test_nor_does_it_start_with_one(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", *flags]) == 1
    assert "is not in outgoing_allow" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers=1=tcp://*:5557", "--block-size=16"], everywhere("*")),
        (["--workers=1=tcp://0.0.0.0:5557", "--block-size=16"], everywhere("0.0.0.0")),
        (["--workers=1=tcp://::1:5557", "--block-size=16"], "has brackets: tcp://[::1]:5557"),
        (["--peers=http://0.0.0.0:8090"], everywhere("0.0.0.0")),
        (["--replica-sync-port=5600", "--replica-sync-peers=tcp://[::]:5600"], everywhere("::")),
        (
            ["--workers=tcp://me:secret@h:1", "--block-size=16"],
            "'tcp://***@h:1': expected the form",
        ),
        (["--workers=x=tcp://me:secret@h:1", "--block-size=16"], "tcp://***@h:1': bad instance id"),
    ],
)
def test_what_is_no_address_is_said_at_the_start(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "check", *flags]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--indexer-bind=*:8090",
            "write 0.0.0.0 for every IPv4 address, or [::] for every IPv6 address",
        ),
        (
            "--replica-sync-host=*",
            "write 0.0.0.0 for every IPv4 address, or [::] for every IPv6 address",
        ),
        ("--indexer-bind=::1:8090", "an IPv6 address needs brackets: [::1]:8090"),
        ("--indexer-bind=tcp://0.0.0.0:8090", "expected HOST:PORT"),
        ("--replica-sync-peers=tcp://*:5600", everywhere("*")),
        ("--replica-sync-peers=tcp://::1:5600", "has brackets: tcp://[::1]:5600"),
        ("--peers=http://*:8090", everywhere("*")),
        ("--peers=http://::1:8090", "an IPv6 address has brackets"),
    ],
)
def test_what_is_no_address_is_said_of_a_flag(
    flag: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["config", "check", flag])
    assert message in capsys.readouterr().err
