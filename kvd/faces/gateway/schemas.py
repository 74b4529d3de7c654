"""What the gateway says of its routes: bodies and answers are the engines', and open."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.faces.common.schemas import (
    ANY,
    COUNT,
    EVERY_FACE,
    FLAG,
    HEALTH,
    JSON,
    TEXT,
    U64,
    Content,
    Description,
    Operation,
    array,
    by_name,
    by_rank,
    in_json,
    members,
    nullable,
    one_of,
    row,
)
from kvd.faces.gateway.routes import RELAYED
from kvd.gateway.probing import Kind
from kvd.gateway.upstreams import Standing
from kvd.selection.worker_record import Role

STREAM = "text/event-stream"
ANSWER: Content = {JSON: {"schema": by_name(ANY)}, STREAM: {"schema": TEXT}}
FAILURE = members(
    {
        "error": members(
            {"message": TEXT, "type": TEXT, "param": nullable(TEXT), "code": nullable(TEXT)}
        )
    }
)
CARD = members({"id": TEXT})
UPSTREAM = row(
    {
        "url": TEXT,
        "worker_id": U64,
        "standing": one_of(*Standing),
        "role": nullable(one_of(*Role)),
        "problem": nullable(TEXT),
        "advice": nullable(TEXT),
    },
    {
        "engine": one_of(*Kind),
        "version": TEXT,
        "models": array(TEXT),
        "block_size": COUNT,
        "blocks": nullable(COUNT),
        "ranks": COUNT,
        "events": by_rank(TEXT),
        "renders": FLAG,
    },
)
ADDED = in_json(row({"url": TEXT, "worker_id": U64}))
NAME = row({"name": TEXT, "addresses": COUNT, "problem": nullable(TEXT)})
KVD = row({"url": TEXT, "up": FLAG, "problem": nullable(TEXT)})
READY = in_json(row({"ready": FLAG, "serving": COUNT}))
# Whatever an engine answers with goes on, and the gateway's own failures are of these, too.
REFUSED = (400, 404, 429, 502, 503, 504)

OPERATIONS: Mapping[str, Operation] = {
    **{
        f"POST {path}": Operation(
            "Is answered by an engine",
            {200: ANSWER},
            REFUSED,
            in_json(members({}, {"model": TEXT})),
        )
        for path in RELAYED
    },
    "GET /v1/models": Operation(
        "Lists the models of all engines",
        {200: in_json(row({"object": {"const": "list"}, "data": array(CARD)}))},
    ),
    "GET /v1/models/{model}": Operation("Shows a model", {200: in_json(CARD)}, (404,)),
    "GET /ready": Operation("Says whether a request could be served", {200: READY, 503: READY}),
    "GET /status": Operation(
        "Shows every engine, and every kvd that chooses for the gateway",
        {
            200: in_json(
                row(
                    {"upstreams": array(UPSTREAM), "names": array(NAME)},
                    {"kvds": array(KVD), "process": TEXT},
                )
            )
        },
    ),
    "POST /upstreams": Operation(
        "Adds an engine",
        {201: ADDED},
        (400, 409, 503),
        in_json(members({"url": TEXT}, {"role": nullable(one_of(Role.PREFILL))})),
    ),
    "DELETE /upstreams/{worker_id}": Operation(
        "Takes out an engine that a call has added", {200: ADDED}, (404,)
    ),
    "GET /health": HEALTH,
    **EVERY_FACE,
}
DESCRIPTION = Description(OPERATIONS, FAILURE)
