"""Options of Dynamo's router: further names of kvd's own options, and warnings about the rest."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.config.binds import parse_face_binds
from kvd.config.errors import StartError
from kvd.config.load import load, unused
from kvd.config.settings import WITHOUT_EFFECT
from kvd.config.sources import CONFIG, without_effect
from tests.support.commands import Ended, run_command
from tests.support.http_client import Client
from tests.support.ports import find_free_port
from tests.support.running import running, running_kvd


@pytest.mark.parametrize(
    "variable",
    [
        "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
        "DYN_ROUTER_PREFILL_LOAD_SCALE",
        "DYN_OVERLAP_SCORE_WEIGHT",
    ],
)
def test_the_weight_has_the_names_of_all_versions(variable: str) -> None:
    weight = load({}, {variable: "2.5"}).router.settings.members["overlap_weight"]
    assert weight == 2.5
    same = {variable: "2.5", "DYN_OVERLAP_SCORE_WEIGHT": "2.5"}
    assert load({}, same).router.settings.members["overlap_weight"] == 2.5
    with pytest.raises(StartError, match=f"{variable}='-1'"):
        load({}, {variable: "-1"})


def test_names_of_one_setting_must_not_differ() -> None:
    names = ("DYN_ROUTER_PREFILL_LOAD_SCALE", "DYN_OVERLAP_SCORE_WEIGHT")
    with pytest.raises(StartError, match=" and ".join(names) + " set the same value and differ"):
        load({}, dict(zip(names, ("1", "2"), strict=True)))


def test_what_kvd_does_not_know_is_told_from_what_it_has_no_use_for() -> None:
    environ = {
        "DYN_ROUTER_TEMPERATUR": "1",
        "DYN_ROUTER_TEMPERATURE": "1",
        "DYN_ROUTER_OTHER": "1",
        "KVD_ROUTER_TEMPERATURE": "1",
        "KVD_ROUTER_TEMPRATURE": "1",
        "DYN_ROUTER_REPLICA_SYNC": "true",
        "DYN_OVERLAP_SCORE_WEIGHT": "1",
        "DYN_OTHER": "1",
        "KVD_UPSTREAM": "http://127.0.0.1:1",
        "KVD_UPSTREAMS": "http://127.0.0.1:1",
        "KVD_CONFIG": "kvd.toml",
        "KVD_INDEXER_PORT": "tcp://10.0.0.1:8090",
        "KVD_SERVICE_HOST": "10.0.0.1",
    }
    temperature = "kvd does not know this variable; did you mean DYN_ROUTER_TEMPERATURE?"
    assert dict(without_effect(environ)) == {
        "DYN_ROUTER_TEMPERATUR": temperature,
        "DYN_ROUTER_OTHER": "kvd does not know this variable",
        "KVD_ROUTER_TEMPERATURE": temperature,
        "KVD_ROUTER_TEMPRATURE": temperature,
        "DYN_ROUTER_REPLICA_SYNC": WITHOUT_EFFECT["router-replica-sync"],
        "KVD_UPSTREAM": "kvd does not know this variable; did you mean KVD_UPSTREAMS?",
    }


def test_weights_that_the_policy_does_not_go_by_are_told() -> None:
    environ = {"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "2", "DYN_ROUTER_TEMPERATURE": "1"}
    why = "the policy is kvd; it weighs in dynamo only"
    assert dict(unused(load({}, environ))) == {"router_kv_overlap_score_weight": why}
    assert not dict(unused(load({}, environ | {"KVD_ROUTER_POLICY": "dynamo"})))
    assert not dict(unused(load({}, {"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "1"})))


def test_a_file_of_the_gateway_serves_other_commands_too(tmp_path: Path) -> None:
    """They say that its engines have no effect; who names engines by a flag wants a gateway."""
    path = tmp_path / "gateway.toml"
    path.write_text('upstreams = ["http://127.0.0.1:9"]\ngateway_kvd = []\n')
    of_file = {CONFIG: str(path)}
    why = "no gateway runs here: set gateway_bind, or run `kvd gateway`"
    assert dict(unused(load(of_file, {}))) == {"upstreams": why}
    gateway = {"gateway_bind": parse_face_binds("127.0.0.1:0")}
    assert not dict(unused(load({**of_file, **gateway}, {})))
    checked = run_command("config", "check", "--config", str(path))
    assert checked == Ended(0, "ok\n", f"kvd: warning: upstreams has no effect: {why}\n")
    refused = run_command("config", "check", "--upstreams", "http://127.0.0.1:9")
    assert refused == Ended(1, "", "kvd: --upstreams needs --gateway-bind\n")


def test_a_check_warns_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVD_HTTP_IDEL_S", "3")
    monkeypatch.setenv("DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT", "2")
    assert main(["config", "check"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "ok\n"
    warned = [line.partition(" has no effect: ")[0] for line in shown.err.splitlines()]
    assert warned == [
        f"kvd: warning: {name}" for name in ("KVD_HTTP_IDEL_S", "router_kv_overlap_score_weight")
    ]


@pytest.mark.parametrize("face", ["serve", "select-service"])
def test_flags_and_variables_without_effect_are_taken_and_warned_of(
    tmp_path: Path, face: str
) -> None:
    flags = [f"--{flag}=8" for flag in WITHOUT_EFFECT if flag != "router-replica-sync"]
    flags += ["--router-replica-sync", "--no-router-durable-kv-events"]
    environ = {"DYN_ROUTER_SOMETHING": "1", "DYN_ROUTER_SNAPSHOT_THRESHOLD": "5"}
    with ExitStack() as opened:
        if face == "serve":
            port = find_free_port()
            flags += [f"--selection-bind=127.0.0.1:{port}"]
            flags += [f"--{name}-bind=off" for name in ("indexer", "slot-tracker", "conductor")]
            server = opened.enter_context(running(tmp_path, port, face, *flags, environ=environ))
        else:
            server = opened.enter_context(running_kvd(tmp_path, *flags, face=face, environ=environ))
        warned = [line for line in server.stderr.splitlines() if "option_without_effect" in line]
        for flag, why in WITHOUT_EFFECT.items():
            assert any(f"option=--{flag} " in line and why in line for line in warned), flag
        for option in ("--no-router-durable-kv-events", *environ):
            assert any(f"option={option} " in line and "level=warning" in line for line in warned)
        assert len(warned) == len(WITHOUT_EFFECT) + 3


@pytest.mark.parametrize(("weight", "chosen"), [("0", 1), ("3", 2)])
def test_requests_of_a_worker_weigh_beside_its_blocks(
    tmp_path: Path, weight: str, chosen: int
) -> None:
    environ = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
    environ["DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT"] = weight
    with (
        running_kvd(tmp_path, face="select-service", environ=environ) as server,
        Client(server.base_url) as client,
    ):
        for worker_id in (1, 2):
            row = {"worker_id": worker_id, "block_size": 4, "endpoint": "http://w"}
            client.post("/workers", json=row).raise_for_status()
        # Worker 1 has two requests that share a block, worker 2 one of two blocks.
        for worker_id, tokens in ((1, [1] * 4), (1, [1] * 4), (2, [2] * 8)):
            pinned = {"worker_id": worker_id, "dp_rank": 0}
            booked = client.post(
                "/select_and_reserve", json={"token_ids": tokens, "pinned_worker": pinned}
            )
            path = f"/reservations/{booked.json()['reservation_id']}/prefill_complete"
            client.post(path).raise_for_status()
        selected = client.post("/select", json={"token_ids": [5] * 4}).json()
        assert selected["worker_id"] == chosen


def test_the_credit_of_the_device_can_be_said() -> None:
    config = load({}, {"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": "0.5"})
    assert config.router.settings.members["device_credit"] == 0.5


@pytest.mark.parametrize("value", ["-0.1", "nan", "inf"])
def test_a_decay_of_the_credit_is_finite_and_not_negative(value: str) -> None:
    variable = "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY"
    with pytest.raises(StartError, match=f"{variable}='{value}'"):
        load({}, {variable: value})


@pytest.mark.parametrize(("decay", "chosen"), [("0", 1), ("1", 2)])
def test_the_credit_of_the_device_decays_with_the_load(
    tmp_path: Path, decay: str, chosen: int
) -> None:
    flags = ["--router-kv-overlap-score-credit=1.5"]
    flags += [f"--router-kv-overlap-score-credit-decay={decay}"]
    environ = {"DYN_ROUTER_USE_KV_EVENTS": "false"}
    prompt = list(range(32))
    with (
        running_kvd(tmp_path, *flags, face="select-service", environ=environ) as server,
        Client(server.base_url) as client,
    ):
        for worker_id in (1, 2):
            row = {"worker_id": worker_id, "block_size": 4, "endpoint": "http://w"}
            client.post("/workers", json=row).raise_for_status()
        # Worker 1 caches the prompt, as predicted, and has 28 other tokens to prefill; worker 2
        # caches its first quarter.
        for name, worker_id, tokens in (("a", 1, prompt), ("b", 2, prompt[:8])):
            body = {"token_ids": tokens, "pinned_worker": {"worker_id": worker_id, "dp_rank": 0}}
            body["reservation_id"] = name
            client.post("/select_and_reserve", json=body).raise_for_status()
            client.delete(f"/reservations/{name}").raise_for_status()
        booked = {"worker_id": 1, "dp_rank": 0, "sequence_hashes": [], "isl_tokens": 28}
        booked |= {"selection_id": "c", "effective_prefill_tokens": 28}
        client.post("/reservations", json=booked).raise_for_status()
        # The fast path answers the first request, the handler the second: both weigh alike.
        for members in ({}, {"explain": True}):
            selected = client.post("/select", json={"token_ids": prompt, **members}).json()
            assert selected["worker_id"] == chosen
        first, second = selected["candidates"]
        assert first["credit_blocks"] == (12.0 if decay == "0" else 1.5 * (1 / 1.875) * 8)
        assert second["credit_blocks"] == 1.5 * 2
        assert (first["raw_prefill_blocks"], second["raw_prefill_blocks"]) == (15.0, 8.0)
