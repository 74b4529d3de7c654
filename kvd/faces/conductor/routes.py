"""Mooncake Conductor's Indexer API over the KV Events standard (docs/faces/conductor.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import trio

from kvd.errors import BadRequest, Conflict, NotFound
from kvd.faces.common.bodies import json_response
from kvd.faces.common.monitoring import health_route
from kvd.faces.conductor import msgpack as packed
from kvd.faces.conductor.handlers import HashQueryHandler, QueryHandler
from kvd.faces.conductor.listings import global_view, services
from kvd.faces.conductor.members import Topic, detailed, usable
from kvd.faces.conductor.registration import read_narrowing, read_publisher
from kvd.http.hot import HotHandler
from kvd.http.limits import LONG_BODY_LIMIT
from kvd.http.messages import Request, Response
from kvd.http.routes import Handler, Route, Scope
from kvd.index.partitions import Partition, State
from kvd.index.publishers import Publishers
from kvd.wire.curve import check_server_key
from kvd_core.conductor.conductor import Conductor

Sequence = Callable[[Conductor], Awaitable[None]]  # makes its missing sequence hashes

REGISTERED = "registered successfully"
UNREGISTERED = "unregistered successfully"

# Reasons of failures that do not give one, by status.
REASONS = {
    400: "invalid_request",
    401: "unauthenticated",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    413: "too_large",
    414: "invalid_request",
    417: "invalid_request",
    421: "misdirected",
    431: "invalid_request",
    500: "internal",
    503: "unavailable",
}

# Steps of making sequence hashes between two checkpoints: 4,096 blocks, 1 to 1.5 ms.
SEQUENCE_STEPS = 8192


def routes(state: State, publishers: Publishers) -> tuple[Route, ...]:
    """Returns the face's routes over the daemon's state."""
    sequence = partial(_make_sequences, trio.Lock())
    packed_by_hash = partial(_packed_query_by_hash, state, sequence)
    by_hash = HashQueryHandler(state.sized, packed_by_hash, state.served, sequence)
    return (
        health_route(),
        _hot("/query", QueryHandler(state.sized, partial(_packed_query, state), state.served)),
        _hot("/query_by_hash", by_hash),
        _admin("/register", partial(register, publishers)),
        _admin("/unregister", partial(unregister, publishers)),
        Route("GET", "/services", partial(services, publishers), hot=True),
        Route("GET", "/global_view", partial(global_view, state, publishers), hot=True),
    )


def _hot(path: str, handler: HotHandler) -> Route:
    return Route("POST", path, handler, True, LONG_BODY_LIMIT, any_type=True, scope=Scope.READ)


def _admin(path: str, handler: Handler) -> Route:
    return Route("POST", path, handler, hot=True, any_type=True, scope=Scope.ADMIN)


# ---- questions in msgpack, and missing sequence hashes


def _packed_query(state: State, request: Request) -> Response:
    """Answers a question about token ids in msgpack."""
    topic, tokens = packed.read_question(request.body, "token_ids", 4)
    partition = _partition_of(state, topic)
    if topic is None or partition is None:
        return packed.rows(())
    asked = topic.lora_name, topic.cache_salt, topic.instance
    return packed.rows(partition.conductor.tiers_of_tokens(tokens, *asked))


async def _packed_query_by_hash(state: State, sequence: Sequence, request: Request) -> Response:
    """Answers a question about sequence hashes in msgpack."""
    topic, hashes = packed.read_question(request.body, "seq_hashes", 8)
    partition = _partition_of(state, topic)
    if topic is None or partition is None:
        return packed.rows(())
    await sequence(partition.conductor)
    asked = topic.lora_name, topic.cache_salt, topic.instance
    return packed.rows(partition.conductor.tiers_of_hashes(hashes, *asked))


def _partition_of(state: State, topic: Topic | None) -> Partition | None:
    """Returns the partition that can answer a question; raises Misdirected."""
    if topic is None:
        return None
    partition = state.sized.get(topic[:3])
    if partition is None:
        state.served.check(topic[:2])
    return partition


async def _make_sequences(making: trio.Lock, conductor: Conductor) -> None:
    """Makes missing sequence hashes; of the questions that wait, the one with the lock does it."""
    if conductor.sequence(0):
        return
    async with making:
        while not conductor.sequence(SEQUENCE_STEPS):
            await trio.lowlevel.checkpoint()


# ---- registrations


def register(publishers: Publishers, request: Request) -> Response:
    in_msgpack = packed.is_packed(request)
    described = (packed.read_publisher if in_msgpack else read_publisher)(request.body)
    outgoing = publishers.outgoing
    usable(described.endpoint, "endpoint", outgoing.check_endpoint)
    usable(described.replay_endpoint, "replay_endpoint", outgoing.check_replay_endpoint)
    usable(described.server_key, "curve_server_key", check_server_key)
    try:
        publishers.register(described)
    except Conflict as error:
        refusal = BadRequest(str(error)) if in_msgpack else error
        raise detailed(refusal, "invalid_registration") from None
    answer = {"status": REGISTERED, "instance_id": described.instance_id}
    return packed.response(answer) if in_msgpack else json_response(answer)


async def unregister(publishers: Publishers, request: Request) -> Response:
    in_msgpack = packed.is_packed(request)
    wanted = (packed.read_narrowing if in_msgpack else read_narrowing)(request.body)
    try:
        removed = await publishers.unregister(wanted)
    except NotFound as error:
        raise detailed(error, "not_found") from None
    answer = {"status": UNREGISTERED, "removed_instances": removed}
    return packed.response(answer) if in_msgpack else json_response(answer)
