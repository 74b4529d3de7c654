"""Descriptions of the gateway's routes. Engines' bodies and answers may have any members."""

from __future__ import annotations

from collections.abc import Mapping

from kvd.faces.common.every_face import EVERY_FACE, HEALTH
from kvd.faces.common.schemas import (
    ANY,
    COUNT,
    FLAG,
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
from kvd.faces.gateway.routes import RELAYED, STORED
from kvd.gateway.probing import EngineKind
from kvd.gateway.requests import Api
from kvd.gateway.upstream import UpstreamState
from kvd.selection.worker_record import Role

STREAM = "text/event-stream"
ANSWER: Content = {JSON: {"schema": by_name(ANY)}, STREAM: {"schema": TEXT}}
# The gateway's failures have OpenAI's form, or Anthropic's below /v1/messages; engines add others.
FAILURE = {
    "anyOf": [
        members(
            {
                "error": members(  # an engine's code may be a number
                    {"message": TEXT, "type": TEXT}, {"param": nullable(TEXT), "code": {}}
                )
            }
        ),
        members(
            {
                "type": {"const": "error"},
                "error": members({"type": TEXT, "message": TEXT}),
            },
            {"request_id": TEXT},
        ),
        members({"object": {"const": "error"}, "message": TEXT}),
        members({"error": TEXT}),
        members({"detail": ANY}),
    ]
}
CARD = members({"id": TEXT})
UPSTREAM = row(
    {
        "url": TEXT,
        "worker_id": U64,
        "standing": one_of(*UpstreamState),
        "role": nullable(one_of(*Role)),
        "problem": nullable(TEXT),
        "advice": nullable(TEXT),
    },
    {
        "engine": one_of(*EngineKind),
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
# Statuses of the gateway's own failures. Clients also get those of engines, whatever they are.
REFUSED = (400, 404, 429, 502, 503, 504)

SOUND: Content = {"audio/*": {"schema": TEXT}}
FORM: Content = {"multipart/form-data": {"schema": members({}, {"model": nullable(TEXT)})}}
BODY = in_json(members({}, {"model": nullable(TEXT)}))

OPERATIONS: Mapping[str, Operation] = {
    **{
        f"POST {path}": Operation(
            "Relays the request to an engine",
            {200: SOUND if path == "/v1/audio/speech" else ANSWER},
            REFUSED,
            FORM if api is Api.FORM else BODY,
        )
        for path, api in RELAYED.items()
    },
    **{
        f"{method} {path}": Operation(
            "Relays the request to the engine that keeps the response", {200: ANSWER}, REFUSED
        )
        for method, path in STORED
    },
    "GET /v1/models": Operation(
        "Lists the models of all engines",
        {
            200: in_json(
                row(
                    {
                        "object": {"const": "list"},
                        "data": array(CARD),
                        "first_id": nullable(TEXT),
                        "last_id": nullable(TEXT),
                        "has_more": {"const": False},
                    }
                )
            )
        },
    ),
    "GET /v1/models/{model}": Operation("Shows a model", {200: in_json(CARD)}, (404,)),
    "GET /ready": Operation("Returns whether a request could be served", {200: READY, 503: READY}),
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
        (400, 409, 422, 503),
        in_json(members({"url": TEXT}, {"role": nullable(one_of(Role.PREFILL))})),
    ),
    "DELETE /upstreams/{worker_id}": Operation(
        "Removes an engine that a call has added", {200: ADDED}, (404,)
    ),
    "GET /health": HEALTH,
    **EVERY_FACE,
}
DESCRIPTION = Description(OPERATIONS, FAILURE)
