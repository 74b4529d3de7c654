"""Real engines' messages over real sockets: ZMQ into a running kvd, HTTP out of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing

import msgpack
import pytest
import zmq

from tests.captures.recording import AgreementStats, Answer, Question, Rank, Recording, judge, load
from tests.support.http_client import Client
from tests.support.processes import Server
from tests.support.running import running_kvd

DEADLINE_MS = 20_000  # to subscribe, which takes milliseconds
LAST_TOKEN = 2**32 - 1  # occurs in no recording

NAMES = (
    "vllm-0.33.0-dp4",
    "vllm-0.33.0-hybrid",
    "vllm-0.33.0-ident",
    "vllm-0.33.0-offload-self-fs",
    "sglang-0.5.23-hicache-write_through",
)


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_kvd(tmp_path_factory.mktemp("kvd")) as server:
        yield server


@pytest.fixture
def client(kvd: Server) -> Iterator[Client]:
    with Client(kvd.base_url) as made:
        yield made


@pytest.mark.parametrize("name", NAMES)
def test_a_running_kvd_answers_as_the_engine_does(name: str, kvd: Server, client: Client) -> None:
    recording = load(name)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        for rank in recording.ranks:
            publisher = stack.enter_context(closing(context.socket(zmq.XPUB)))
            _play(recording, rank, publisher, client)
        for rank in recording.ranks:
            kvd.wait_until(lambda rank=rank: _applied(recording, rank, client), "up to date")
        stats, wrong = judge(recording, lambda question: _ask(recording, question, client))
    figures = sum(len(question.figures) for question in recording.questions)
    assert stats == AgreementStats(agree=figures), "\n".join(wrong)


def _play(recording: Recording, rank: Rank, publisher: zmq.Socket, client: Client) -> None:
    """Registers one rank, sends all that it sent, and a further block that marks the end."""
    publisher.linger = 0
    publisher.sndhwm = 0
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    instance, dp_rank = rank
    registration = {
        "instance_id": instance,
        "dp_rank": dp_rank,
        "endpoint": f"tcp://127.0.0.1:{port}",
        "model_name": recording.name,
        "block_size": recording.block_size,
    }
    assert client.post("/register", json=registration).status_code == 201
    assert publisher.poll(DEADLINE_MS), "nobody subscribed"
    messages = [message for message in recording.messages if message.rank == rank]
    for message in messages:
        _send(publisher, message.topic, message.seq, message.payload)
    _send(publisher, b"", messages[-1].seq + 1, _end(recording))


def _end(recording: Recording) -> bytes:
    tokens = [LAST_TOKEN] * recording.block_size
    stored = ["BlockStored", [LAST_TOKEN], None, tokens, recording.block_size]
    return msgpack.packb([0.0, [stored]])


def _send(publisher: zmq.Socket, topic: bytes, seq: int, payload: bytes) -> None:
    publisher.send_multipart([topic, seq.to_bytes(8, "big"), payload])


def _applied(recording: Recording, rank: Rank, client: Client) -> bool:
    last = Question(rank, [LAST_TOKEN] * recording.block_size, None, None, [], {})
    instance, dp_rank = map(str, rank)
    return bool(_ask(recording, last, client)["scores"].get(instance, {}).get(dp_rank))


def _ask(recording: Recording, question: Question, client: Client) -> Answer:
    if question.items:
        hashes = question.hashes(recording.block_size)
        path, body = "/query_by_hash", {"block_hashes": hashes}
    else:
        path, body = "/query", {"token_ids": question.tokens, "lora_name": question.lora_name}
    body |= {"model_name": recording.name, "cache_salt": question.cache_salt}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()
