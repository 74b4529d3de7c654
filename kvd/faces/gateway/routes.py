"""The gateway's routes: what engines answer, and what the gateway answers itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NoReturn

from kvd.faces.common.monitoring import HEALTH
from kvd.gateway.asking import Api
from kvd.gateway.choices import Choices
from kvd.gateway.errors import GatewayError, Reason, openai_error
from kvd.gateway.forwarding import Forwarder
from kvd.gateway.upstreams import Standing, Upstreams
from kvd.http.errors import Failures
from kvd.http.types import Request, Response, Route, Scope

# Paths that engines answer, each with the API that its prompt and its errors are of.
RELAYED: Mapping[str, Api] = {
    "/v1/chat/completions": Api.CHAT,
    "/v1/completions": Api.COMPLETIONS,
    "/v1/messages": Api.MESSAGES,
    "/v1/messages/count_tokens": Api.MESSAGES,
    "/v1/responses": Api.RESPONSES,
    "/v1/embeddings": Api.OTHER,
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


class OpenAiFailures(Failures):
    """Words what the server itself refuses as OpenAI's clients expect it."""

    _CODES: Mapping[int, Reason] = {404: Reason.UNKNOWN_URL}

    def _members(
        self, status: int, text: str, details: Mapping[str, object] | None
    ) -> dict[str, object]:
        if status in self._CODES:
            return openai_error(GatewayError(self._CODES[status], text))
        kind = "server_error" if status >= 500 else "invalid_request_error"
        code = {413: "request_too_large", 415: "unsupported_encoding"}.get(status)
        return {"error": {"message": text, "type": kind, "param": None, "code": code}}


def gateway_routes(
    upstreams: Upstreams,
    choices: Choices,
    forwarder: Forwarder,
    body_limit: int,
    process: str | None = None,
) -> tuple[Route, ...]:
    """Returns the face's routes; bodies have `body_limit` bytes at most.

    One of several processes shows its name.
    """
    relayed = tuple(
        Route(
            "POST",
            path,
            _never,
            hot=True,
            body_limit=body_limit,
            any_type=True,
            scope=Scope.OPEN,
            relays=partial(forwarder.serve, api),
        )
        for path, api in RELAYED.items()
    )
    return (
        *relayed,
        Route("GET", "/v1/models", partial(list_models, upstreams), scope=Scope.OPEN),
        Route("GET", "/v1/models/{model}", partial(show_model, upstreams), scope=Scope.OPEN),
        Route("GET", "/ready", partial(ready, upstreams), scope=Scope.OPEN),
        Route("GET", "/status", partial(status, upstreams, choices, process)),
        HEALTH,
    )


def _never(request: Request) -> NoReturn:
    raise AssertionError("the answers of this route are relayed")


def list_models(upstreams: Upstreams, request: Request) -> Response:
    """Lists the models of all engines, each once."""
    cards = list(_cards(upstreams))
    return _json({"object": "list", "data": cards})


def show_model(upstreams: Upstreams, request: Request) -> Response:
    """Shows one model."""
    from urllib.parse import unquote

    name = unquote(request.captured.decode("latin-1"))
    for card in _cards(upstreams):
        if card["id"] == name:
            return _json(card)
    error = GatewayError(Reason.MODEL_NOT_FOUND, f"The model `{name}` does not exist.", "model")
    return Response(404, json.dumps(openai_error(error)).encode())


def _cards(upstreams: Upstreams) -> Iterator[dict[str, Any]]:
    """Yields a card for each name: the first engine's, with the shortest context of all."""
    found: dict[str, dict[str, Any]] = {}
    for upstream in upstreams:
        for card in upstream.facts.models if upstream.facts is not None else ():
            known = found.setdefault(card.name, dict(card.members))
            lengths = [each for each in (known.get("max_model_len"), card.max_model_len) if each]
            if lengths:
                known["max_model_len"] = min(lengths)
    yield from found.values()


def ready(upstreams: Upstreams, request: Request) -> Response:
    """Says whether a request could be served now."""
    serving = sum(upstream.standing is Standing.SERVING for upstream in upstreams)
    body = json.dumps({"ready": serving > 0, "serving": serving}).encode()
    return Response(200 if serving else 503, body)


def status(
    upstreams: Upstreams, choices: Choices, process: str | None, request: Request
) -> Response:
    """Shows every engine: what it has said of itself, and how it is; and the kvds that choose."""
    names = [
        {"name": wanted.url, "addresses": len(name.urls), "problem": name.problem}
        for wanted, name in upstreams.followed.items()
    ]
    shown: dict[str, object] = {
        "upstreams": [_shown(upstream) for upstream in upstreams],
        "names": names,
    }
    if (kvds := choices.shown()) is not None:
        shown["kvds"] = kvds
    if process is not None:
        shown["process"] = process
    return _json(shown)


def _shown(upstream: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "url": upstream.url,
        "worker_id": upstream.worker_id,
        "standing": upstream.standing.value,
        "role": upstream.role,
        "problem": upstream.problem,
        "advice": upstream.advice,
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
