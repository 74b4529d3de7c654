"""The fleet file is read, and each mistake in it is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.faces.indexer import registration as indexer
from kvd.fleet_file import parse as fleetfile
from kvd.wire.egress import EgressPolicy

RANK = 'instance_id = 1\nmodel_name = "m"\nblock_size = 16\nendpoint = "tcp://10.0.0.1:5557"\n'
FLEET = f"""
[[indexer]]
{RANK}
[[indexer]]
{RANK}dp_rank = 1
replay_endpoint = "tcp://w-0.workers:5558"
tenant_id = "t"

[[slot_tracker]]
model_name = "m"
worker_id = 1
block_size = 16
dp_start = 0
dp_size = 2

[[selection]]
worker_id = 1
model_name = "m"
endpoint = "http://10.0.0.1:8000"
block_size = 16
data_parallel_size = 2
kv_events_endpoints = {{ 0 = "tcp://10.0.0.1:5557", 1 = "ipc:///run/engine-1" }}
taints = ["gpu"]
kv_transfer_preferred_weight = 0.5

[[policy]]
model_name = "m"
tenant_id = "t"
router_policy = "kvd,hold_up=0.2"

[[conductor]]
instance_id = "p"
type = "vLLM"
model = "m"
block_size = 16
dp_rank = 0
endpoint = "tcp://10.0.0.1:5559"

[[replica]]
endpoint = "tcp://10.0.0.9:5600"
"""


def load(text: str, folder: Path) -> list[fleetfile.FleetFileEntry]:
    path = folder / "fleet.toml"
    path.write_text(text)
    return fleetfile.load(path, EgressPolicy())


def test_entries_of_every_table(tmp_path: Path) -> None:
    entries = load(FLEET, tmp_path)
    assert [str(entry) for entry in entries] == [
        "indexer, entry 1",
        "indexer, entry 2",
        "slot_tracker, entry 1",
        "selection, entry 1",
        "policy, entry 1",
        "conductor, entry 1",
        "replica, entry 1",
    ]
    assert entries[0].wanted == indexer.read_rank(
        b'{"instance_id":1,"model_name":"m","block_size":16,"endpoint":"tcp://10.0.0.1:5557"}'
    )
    assert entries[3].wanted.kv_events_endpoints[1] == "ipc:///run/engine-1"
    assert load("", tmp_path) == []


def rank(*, without: str = "", more: str = "") -> str:
    lines = [line for line in RANK.splitlines() if not without or not line.startswith(without)]
    return "[[indexer]]\n" + "\n".join(lines) + f"\n{more}\n"


POLICY = '[[policy]]\nmodel_name = "m"\nrouter_policy = '
WORKER = '[[selection]]\nworker_id = 1\nendpoint = "http://x"\nblock_size = 16\n'

WRONG = {
    "[": "Expected|Invalid",
    "\udcff": "^the file is not UTF-8 in line 1$",
    "indexer = 1": r"^indexer: expected \[\[indexer\]\]$",
    "indexer = [1]": r"^indexer: expected \[\[indexer\]\]$",
    "[indexer]": r"^indexer: expected \[\[indexer\]\]$",
    "[[indexr]]": r"^indexr: no such table; indexer\?$",
    "x = 1": "^x: no such table$",
    rank(without="endpoint"): "^indexer, entry 1: missing member `endpoint`$",
    rank() + rank(without="block"): "^indexer, entry 2: missing member `block_size`$",
    rank() + rank(without="endpoint", more="endpoint = 'tcp://10.0.0.9:1'"): (
        "^indexer, entry 2 is for the same instance and rank as entry 1$"
    ),
    rank(more="dp_rnk = 1"): r"^indexer, entry 1: dp_rnk: no such member; dp_rank\?$",
    rank(more="dp_rank = '1'"): "^indexer, entry 1: dp_rank: expected a whole number$",
    rank(more="dp_rank = 1.0"): "^indexer, entry 1: dp_rank: expected a whole number$",
    rank(more="dp_rank = -1"): "^indexer, entry 1: dp_rank: expected a number from",
    rank(more="dp_rank = 2026-01-01"): "^indexer, entry 1: a member cannot be a date or a time",
    "indexer = " + "[" * 20_000: "^arrays or tables are nested too deeply$",
    rank(more="lora_name." + "a." * 2_000 + "a = 1"): "^indexer, entry 1: ",
    rank(
        more="dp_rank." + "a." * 2_000 + "a = 1"
    ): "^indexer, entry 1: tables are nested too deeply",
    rank(more="dp_rank = nan"): "^indexer, entry 1: a number cannot be nan or inf$",
    rank(more="routing_group = 'x'\ntenant_id = 'y'"): "^indexer, entry 1: .* differ$",
    rank(without="endpoint", more="endpoint = 'tcp://8.8.8.8:1'"): (
        "^indexer, entry 1: invalid ZMQ endpoint .*8.8.8.8 is not in outgoing_allow$"
    ),
    rank(more="replay_endpoint = 'tcp://169.254.169.254:80'"): (
        "^indexer, entry 1: invalid replay endpoint .* is not in outgoing_allow$"
    ),
    rank(without="endpoint", more="endpoint = 'x'"): (
        "^indexer, entry 1: invalid ZMQ endpoint `x`: missing scheme$"
    ),
    POLICY + "'best'": "^policy, entry 1: router_policy: expected one of dynamo",
    POLICY
    + "{policy = 'kvd', weights = {speed = 1}}": "^policy, entry 1: .* speed: no such weight",
    POLICY
    + "{weights = {hold_up = 1}}": "^policy, entry 1: router_policy: policy: expected a text",
    POLICY + "'kvd'\n" + POLICY + "'kvd'": "^policy, entry 2 is for the same model and tenant",
    "[[slot_tracker]]\nmodel_name = 'm'\n": "^slot_tracker, entry 1: missing member",
    WORKER + "role = 'x'": "^selection, entry 1: role: expected one of",
    WORKER + "kv_events_endpoint = 'x'": "^selection, entry 1: invalid ZMQ endpoint `x`",
    WORKER + "kv_events_endpoints = {0 = 'tcp://127.1:5'}": "^selection, entry 1: .*127.1 is no",
    WORKER
    + "replay_endpoint = 'tcp://0.0.0.0:5'": "^selection, entry 1: .*0 stands for every addr",
    WORKER + WORKER: "^selection, entry 2 is for the same worker as entry 1$",
    "[[conductor]]\ntype = ''": "^conductor, entry 1: ",
    "[[replica]]\nendpoint = 'tcp://*:5600'": "^replica, entry 1: .*stands for every address of",
    "[[replica]]\nendpoint = 'tcp://[fe80::1]:5600'": "^replica, entry 1: .*not in outgoing_allow",
    "[[replica]]\nendpoint = 'tcp://10.0.0.1:5600'\ncurve_server_key = 'x'": (
        "^replica, entry 1: invalid curve_server_key"
    ),
    WORKER + "curve_server_key = ''": "^selection, entry 1: invalid curve_server_key",
    rank(more="curve_server_key = 'x'"): "^indexer, entry 1: invalid curve_server_key",
    "#" + "x" * fleetfile.MAX_BYTES: "^the file is longer than 8388608 bytes$",
}


@pytest.mark.parametrize("text", WRONG, ids=lambda text: text[:40])
def test_what_is_wrong_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=WRONG[text]):
        fleetfile.load(path, EgressPolicy())


def test_the_configuration_is_checked_with_its_fleet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    check = ["config", "check", "--fleet-file", str(path)]
    assert main(check) == 0
    assert main([*check, "--outgoing-allow", "private"]) == 1
    assert f"{path}: selection, entry 1: invalid ZMQ endpoint" in capsys.readouterr().err
    path.unlink()
    assert main(check) == 1
    assert f"cannot read {path}: No such file" in capsys.readouterr().err
