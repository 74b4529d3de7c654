"""Faults at the address of an engine: nobody listens, something else does, or nothing is sent."""

from __future__ import annotations

import socket
from contextlib import closing

import msgpack
import pytest
import zmq

from tests.support.patients import Patient, Rank, prompt
from tests.support.ports import find_free_port


def endpoint_of(made: zmq.Socket[bytes]) -> str:
    return made.last_endpoint.decode()


@pytest.mark.parametrize("probe", [True, False])
def test_nobody_listens(patient: Patient, probe: bool) -> None:
    endpoint = f"tcp://127.0.0.1:{find_free_port()}"
    patient.register(endpoint)
    found = patient.finds("engine_unreachable", probe=probe, evidence="Connection refused")
    assert endpoint in found["evidence"]
    assert found["subject"] == "worker 1 rank 0 of m/default" and endpoint in found["remedy"]


def test_a_file_that_is_not_there(patient: Patient) -> None:
    patient.register("ipc:///nowhere/at/all")
    found = patient.finds("engine_unreachable", probe=True)
    assert "No such file or directory" in found["evidence"]


def test_the_port_is_that_of_an_http_server(patient: Patient) -> None:
    patient.register(patient.urls["slot-tracker"].replace("http", "tcp"))
    found = patient.finds("not_zmq", probe=True)
    assert "HTTP/1.1 400" in found["evidence"] and "tcp://127.0.0.1:5557" in found["remedy"]


def test_who_listens_says_nothing(patient: Patient) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:
        patient.register(f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        found = patient.finds("not_zmq", probe=True)
        assert "said nothing" in found["evidence"]


def test_the_port_is_that_of_the_replays(patient: Patient) -> None:
    patient.register(endpoint_of(patient.socket(zmq.ROUTER)))
    assert "as a ROUTER socket" in patient.finds("not_kv_events", probe=True)["evidence"]


def test_messages_of_another_form(patient: Patient) -> None:
    engine = patient.rank()
    engine.publish({"raw_frames_hex": [b"status".hex(), b"all is well".hex()]})
    assert "frame_count 1" in patient.finds("not_kv_events")["evidence"]


def test_batches_that_are_too_long(patient: Patient) -> None:
    engine = patient.socket(zmq.XPUB)
    patient.register(endpoint_of(engine))
    engine.recv()
    engine.send_multipart([b"", bytes(8), bytes(16 * 1024 * 1024 + 1)])
    found = patient.finds("message_too_large")
    assert "1 message of more" in found["evidence"] and "engine_message_bytes" in found["remedy"]


def test_batches_of_another_form(patient: Patient) -> None:
    engine = patient.rank()
    engine.publish({"seq": 0, "payload_hex": msgpack.packb({"load": 0.5}).hex()})
    assert "none of 1 batches" in patient.finds("not_kv_events")["evidence"]


def test_nothing_is_published(patient: Patient) -> None:
    patient.rank()
    found = patient.finds("engine_silent")
    assert "0 messages" in found["evidence"] and "enable_kv_cache_events" in found["remedy"]


def test_only_the_engine_has_a_key(patient: Patient) -> None:
    _, secret = zmq.curve_keypair()
    made = patient.socket(zmq.PUB)
    made.unbind(made.last_endpoint)
    made.set(zmq.CURVE_SERVER, 1)
    made.set(zmq.CURVE_SECRETKEY, secret)
    made.bind("tcp://127.0.0.1:0")
    patient.register(endpoint_of(made))
    assert "wants CURVE" in patient.finds("keys_differ", probe=True)["evidence"]


def test_only_the_registration_has_a_key(patient: Patient) -> None:
    public, _ = zmq.curve_keypair()
    patient.register(endpoint_of(patient.socket(zmq.PUB)), curve_server_key=public.decode())
    patient.finds("keys_differ", probe=True)


def test_the_engine_was_started_again(patient: Patient) -> None:
    engine = patient.rank()
    for _ in range(2):
        rank = Rank(engine)
        rank.serve(prompt(1))
        rank.serve(prompt(2))
        patient.until_applied("m", 1, 0, rank.seq)
        engine.unbind()
        engine.bind()
    rank = Rank(engine)
    rank.serve(prompt(3))
    assert "restarted" in patient.finds("engine_restarted")["evidence"]
