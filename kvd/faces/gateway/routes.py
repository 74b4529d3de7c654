"""The gateway's routes: those that engines answer, and those that the gateway answers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn
from urllib.parse import unquote
from uuid import uuid4

from kvd.faces.common.monitoring import health_route
from kvd.gateway.choices import Choices
from kvd.gateway.errors import OF_STATUS, ErrorForm, GatewayError, Reason
from kvd.gateway.errors import response as error_response
from kvd.gateway.forwarding import Forwarder
from kvd.gateway.heads import request_id_of
from kvd.gateway.probing import GATEWAYS
from kvd.gateway.requests import Api
from kvd.gateway.upstream import Upstream, UpstreamState
from kvd.gateway.upstreams import Upstreams
from kvd.http.errors import Failures
from kvd.http.errors import Refusal as ServerRefusal
from kvd.http.messages import Headers, Request, Response
from kvd.http.routes import Route, Scope

# Paths that engines answer, each with the API that defines the form of its prompts and errors.
RELAYED: Mapping[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/messages": Api.MESSAGES,
    "/v1/messages/count_tokens": Api.COUNT,
    "/v1/responses": Api.RESPONSES,
    "/v1/audio/transcriptions": Api.FORM,
    "/v1/audio/translations": Api.FORM,
    "/v1/audio/speech": Api.OTHER,
    "/v1/embeddings": Api.OTHER,
    "/v2/embed": Api.OTHER,
    "/v1/score": Api.OTHER,
    "/score": Api.OTHER,
    "/v1/rerank": Api.OTHER,
    "/v2/rerank": Api.OTHER,
    "/rerank": Api.OTHER,
    "/pooling": Api.OTHER,
    "/classify": Api.OTHER,
    "/tokenize": Api.OTHER,
    "/detokenize": Api.OTHER,
}
# Routes about a response that an engine keeps.
STORED = (
    ("GET", "/v1/responses/{response_id}"),
    ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"),
)
# Clients that may use engines may list models, and so may those that only read.
MODELS_SCOPE = Scope.GENERATE | Scope.READ


class ClientFailures(Failures):
    """Writes the server's own refusals in the form that clients of each API expect."""

    def response(
        self,
        status: int,
        text: str,
        details: Mapping[str, object] | None = None,
        headers: Headers | None = None,
        path: bytes = b"",
    ) -> Response:
        error = GatewayError(OF_STATUS.get(status, Reason.BAD_REQUEST), text)
        anthropic = path.startswith(b"/v1/messages")
        request_id = request_id_of(headers or [], uuid4().hex)
        form = ErrorForm.ANTHROPIC if anthropic else ErrorForm.OPENAI
        return error_response(error, form, request_id, status)

    def refused(self, refusal: ServerRefusal) -> Response:
        response = self.response(
            refusal.status, str(refusal), headers=refusal.asked, path=refusal.path
        )
        known = {name for name, _ in response.headers}
        response.headers += [each for each in refusal.headers if each[0] not in known]
        return response


def gateway_routes(
    upstreams: Upstreams,
    choices: Choices,
    forwarder: Forwarder,
    body_limit: int,
    process: str | None = None,
) -> tuple[Route, ...]:
    """Returns the face's routes; bodies have `body_limit` bytes at most.

    `process` is the name that one of several processes shows in /status.
    """
    relayed = partial(
        Route, handler=_never, hot=True, any_type=True, body_limit=body_limit, scope=Scope.GENERATE
    )
    own = partial(Route, "GET", hot=True)
    return (
        *(
            relayed("POST", path, relays=partial(forwarder.serve, api))
            for path, api in RELAYED.items()
        ),
        *(relayed(method, path, relays=forwarder.serve_stored) for method, path in STORED),
        own("/v1/models", partial(list_models, upstreams), scope=MODELS_SCOPE),
        own("/v1/models/{model}", partial(show_model, upstreams), deep=True, scope=MODELS_SCOPE),
        own("/ready", partial(ready, upstreams), scope=Scope.OPEN),
        own("/status", partial(status, upstreams, choices, process)),
        health_route(),
    )


def _never(request: Request) -> NoReturn:
    raise AssertionError("the answers of this route are relayed")


def list_models(upstreams: Upstreams, request: Request) -> Response:
    """Lists the models of all engines, each once, in a form that clients of both APIs read."""
    cards = list(_cards(upstreams))
    ends = {
        "first_id": cards[0]["id"] if cards else None,
        "last_id": cards[-1]["id"] if cards else None,
    }
    return _json({"object": "list", "data": cards, **ends, "has_more": False})


def show_model(upstreams: Upstreams, request: Request) -> Response:
    """Shows one model."""
    name = unquote(request.captured.decode("latin-1"))
    for card in _cards(upstreams):
        if card["id"] == name:
            return _json(card)
    error = GatewayError(Reason.MODEL_NOT_FOUND, f"The model `{name}` does not exist.", "model")
    return error_response(error, ErrorForm.OPENAI, request_id_of(request.headers, uuid4().hex))


def _cards(upstreams: Upstreams) -> Iterator[dict[str, Any]]:
    """Yields one card for each model name: the first engine's, made to hold for all engines.

    It has the shortest context, the earliest time of creation and the shortest way by gateways; its
    `root`, which names the model's files, is null where the engines' differ.
    """
    own = upstreams.gateway_id.decode()
    found: dict[str, dict[str, Any]] = {}
    for upstream in upstreams:
        for card in upstream.facts.models if upstream.facts is not None else ():
            way = {GATEWAYS: [own, *card.gateways]}
            known = found.setdefault(card.name, {**card.members, "id": card.name, **way})
            known[GATEWAYS] = min(known[GATEWAYS], way[GATEWAYS], key=len)
            for name, value in (
                ("max_model_len", card.max_model_len),
                ("created", card.members.get("created")),
            ):
                numbers = [each for each in (known.get(name), value) if isinstance(each, int)]
                if numbers:
                    known[name] = min(numbers)
            if known.get("root") != card.members.get("root"):
                known["root"] = None
    yield from found.values()


def ready(upstreams: Upstreams, request: Request) -> Response:
    """Answers whether a request could be served now."""
    serving = sum(upstream.state is UpstreamState.SERVING for upstream in upstreams)
    body = json.dumps({"ready": serving > 0, "serving": serving}).encode()
    return Response(200 if serving else 503, body)


def status(
    upstreams: Upstreams, choices: Choices, process: str | None, request: Request
) -> Response:
    """Shows the facts and the state of every engine, and the kvds that choose engines."""
    names = [
        {"name": wanted.url, "addresses": len(name.urls), "problem": name.problem}
        for wanted, name in upstreams.followed.items()
    ]
    shown: dict[str, object] = {
        "upstreams": [_shown(upstreams, upstream) for upstream in upstreams],
        "names": names,
    }
    if (kvds := choices.shown()) is not None:
        shown["kvds"] = kvds
    if process is not None:
        shown["process"] = process
    return _json(shown)


def _shown(upstreams: Upstreams, upstream: Upstream) -> dict[str, Any]:
    row: dict[str, Any] = {
        "url": upstream.url,
        "worker_id": upstream.worker_id,
        "standing": upstream.state.value,
        "role": upstream.role,
        "problem": upstream.problem,
        "advice": upstreams.advice_about(upstream),
    }
    facts = upstream.facts
    if facts is not None:
        row |= {
            "engine": facts.kind.value,
            "version": facts.version,
            "models": facts.names,
            "block_size": facts.block_size,
            "blocks": facts.blocks,
            "ranks": len(facts.ranks),
            "events": {str(rank): endpoint for rank, endpoint in facts.events.items()},
            "renders": facts.renders,
        }
    return row


def _json(value: object) -> Response:
    return Response(200, json.dumps(value).encode())
