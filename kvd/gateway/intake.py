"""Reads what a request asks for: its model, the engines that may serve it, its tokens.

    head, body ──> ClientRequest ──> Served ──> engines ──> tokens, or a session ──> Attempt

What cannot be served is refused here, before an engine is chosen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvd.gateway.attempts import Attempt, ChosenEngine
from kvd.gateway.chains import Chains
from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.heads import KEY_HEADERS
from kvd.gateway.probing import EngineKind
from kvd.gateway.requests import SCANNER, Api, ClientRequest, passed_gateways, read
from kvd.gateway.stats import Decision
from kvd.gateway.tokens import Tokens
from kvd.gateway.upstream import Upstream
from kvd.gateway.upstreams import Served, Upstreams
from kvd.http.relayed import RelayedRequest
from kvd.http.scanning import scanned_ahead

NOT_BOOKED = ""  # the reservation id of a request that is not booked


class Intake:
    """Makes an Attempt of each request."""

    def __init__(self, upstreams: Upstreams, tokens: Tokens, chains: Chains) -> None:
        self._upstreams = upstreams
        self._tokens = tokens
        self._chains = chains

    async def attempt(self, api: Api, request: RelayedRequest, request_id: bytes) -> Attempt:
        """Reads a request, finds its model, engines and tokens; raises GatewayError."""
        ahead = None if api is Api.FORM else await scanned_ahead(SCANNER, request.body)
        asked = read(api, request.headers, request.body, ahead)
        self._refuse_if_back(asked.passed)
        served = self._served(asked.model, asked.adapter)
        engines = self._upstreams.serving(served)
        if not engines:
            text = f"no engine that serves {asked.model or served.model} can be used now"
            raise GatewayError(Reason.NO_UPSTREAM, text)
        keeper = self._keeper(asked, self._upstreams.keepers(served))
        basis = self._upstreams.basis(served)
        tokens = await self._tokens.find(asked, served, basis, request.body, engines)
        path = request.target.partition(b"?")[0]
        attempt = Attempt(
            asked,
            served,
            tokens,
            None if tokens is None else tokens.count,
            request_id,
            request.body,
            path,
            request.unless_left,
            bound=keeper,
            is_single=asked.is_single,
        )
        if tokens is None or asked.media:
            attempt.session = self._chains.session(asked, served, _tenant(request))
        return attempt

    def stored(
        self, api: Api, request: RelayedRequest, request_id: bytes
    ) -> tuple[Attempt, ChosenEngine]:
        """Reads a request about a stored response; returns it with the engine that keeps that.

        Raises GatewayError.
        """
        self._refuse_if_back(passed_gateways(request.headers))
        path = request.target.partition(b"?")[0]
        name = path.split(b"/")[3].decode("latin-1")
        upstream = self._keeper_of(name)
        if upstream is None:
            text = f"no engine is known to keep the response {name}"
            raise GatewayError(Reason.RESPONSE_NOT_FOUND, text)
        assert upstream.facts is not None
        served = Served(upstream.facts.models[0].name)
        asked = ClientRequest(api, None, False, {})
        attempt = Attempt(
            asked,
            served,
            tokens=None,
            prompt_tokens=None,
            request_id=request_id,
            body=request.body,
            path=path,
            while_wanted=request.unless_left,
        )
        rank = upstream.facts.ranks.start
        chosen = ChosenEngine(upstream, rank, NOT_BOOKED, Decision.SESSION, 0, None, None)
        return attempt, chosen

    def is_renamed(self, attempt: Attempt) -> bool:
        """Returns whether the requested name now stands for another model, with other engines."""
        if attempt.refused is not None or attempt.prefill_failure is not None:
            return False
        return self._upstreams.resolve_model(attempt.served.name) != attempt.served

    def _refuse_if_back(self, passed: bytes) -> None:
        """Raises GatewayError if this gateway is among those that a request has passed."""
        if self._upstreams.gateway_id in passed:
            text = "the request has come back: gateways are engines of each other"
            raise GatewayError(Reason.REQUEST_LOOP, text)

    def _keeper_of(self, response_id: str) -> Upstream | None:
        """Returns the engine that keeps a response, None if that is unknown or gone.

        Where only one engine can be asked, it may also know ids that the gateway does not.
        """
        engines = [one for one in self._upstreams if one.may_keep]
        worker_id = self._chains.keeper(response_id)
        if worker_id is None and len(engines) == 1:
            return engines[0]
        return next((one for one in engines if one.worker_id == worker_id), None)

    def _keeper(self, asked: ClientRequest, engines: Sequence[Upstream]) -> int | None:
        """Returns the worker that keeps the previous response of a request, None if any may serve.

        Raises GatewayError if that worker is unknown or gone. A vLLM or SGLang engine knows only
        its own responses; other servers may share them.
        """
        if asked.api is not Api.RESPONSES or asked.previous is None:
            return None
        kinds = [one.facts.kind for one in engines if one.facts is not None]
        keeper = self._chains.keeper(asked.previous)
        if keeper is None and (len(engines) == 1 or EngineKind.OPENAI in kinds):
            return None
        if keeper not in [one.worker_id for one in engines]:
            text = f"Previous response with id '{asked.previous}' not found."
            raise GatewayError(Reason.PREVIOUS_NOT_FOUND, text, param="previous_response_id")
        return keeper

    def _served(self, name: str | None, adapter: str | None) -> Served:
        """Returns the model that a name stands for, with an adapter if any; raises GatewayError."""
        if not name:
            name = self._upstreams.only_name()
            if name is None:
                if not self._upstreams.names:
                    self._refuse_if_unknown("any model")
                text = "the request names no model, and the engines do not serve exactly one"
                raise GatewayError(Reason.MODEL_NOT_FOUND, text, param="model")
        named = () if adapter is None else (f"{name}:{adapter}",)
        for each in (*named, name):
            if (served := self._upstreams.resolve_model(each)) is not None:
                return served
        self._refuse_if_unknown(name)
        text = f"The model `{name}` does not exist."
        raise GatewayError(Reason.MODEL_NOT_FOUND, text, param="model")

    def _refuse_if_unknown(self, name: str) -> None:
        """Raises GatewayError if an engine that is still to come or to be asked may have it."""
        if not self._upstreams.each:
            raise GatewayError(Reason.NO_UPSTREAM, "the gateway has no engine")
        if not self._upstreams.all_known():
            text = f"no engine is known to serve {name}, but not all have said what they serve"
            raise GatewayError(Reason.NO_UPSTREAM, text)


def _tenant(request: RelayedRequest) -> str:
    """Returns a prefix made from the client's key, which keeps its sessions apart from others'."""
    if not request.is_checked:
        return ""
    shown = b"\0".join(value for name, value in request.headers if name in KEY_HEADERS)
    return f"{hashlib.blake2b(shown, digest_size=8).hexdigest()}:"
