"""Asks an engine what it is: models, block size, ranks, where it publishes its KV events.

    GET /version       is it vLLM?
    GET /server_info   else, is it SGLang?
    GET /v1/models     names, context length, adapters
    vLLM: GET /kv_event_sources (0.31 and later) and the labels of vllm:cache_config_info
    POST .../render    token ids of a whole request, where the engine has it; else POST /tokenize

Sources: the published packages of vLLM 0.10 to 0.33 and of SGLang 0.5.23.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import trio

from kvd.gateway.exchanges import Exchanges
from kvd.gateway.heads import own_head
from kvd.model import is_name
from kvd.selection.worker_record import Role
from kvd.wire.hosts import bracketed
from kvd.wire.urls import Target
from kvd_core.relay.relay import Answer

PROBE_S = 5.0  # time for an engine's answer to one question
PROBE_BYTES = 4 * 1024 * 1024  # bytes of one answer: metrics of an engine with many adapters
DEFAULT_BLOCK_SIZE = 16  # tokens, for an engine that does not report its block size

CACHE_CONFIG = re.compile(r"^vllm:cache_config_info\{(.*)\} 1(?:\.0)?$", re.MULTILINE)
STARTED = re.compile(r"^process_start_time_seconds (\S{1,40})$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
WHOLE = re.compile(r"[0-9]{1,18}")
SGLANG_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}  # by disaggregation_mode
# Shown with requests to servers that may be gateways: the id of each gateway that a request has
# passed. One that comes back to a gateway would go round and round.
GATEWAY_HEADER = b"x-kvd-gateway"
# A member of each model in a gateway's list: the ids of the gateways on the way to its engine. A
# gateway passes over those by way of itself: in a ring they would outlast the engine.
GATEWAYS = "kvd_gateways"
MAX_COUNT = 10**18 - 1  # of tokens or blocks, as WHOLE reads it from metrics
MAX_RANKS = 4096  # ranks that one engine may report
MAX_VERSION = 100  # characters of an engine's version that are kept and shown


class NotAnEngine(Exception):
    """The probed server is no usable engine; the text is for the operator."""


class Unanswered(NotAnEngine):
    """A question has not been answered in time."""


class EngineKind(StrEnum):
    """The kind of an engine."""

    VLLM = "vllm"
    SGLANG = "sglang"
    OPENAI = "openai"  # some server with OpenAI's API


# Flags with which an engine publishes its events; vLLM reports their endpoint since 0.31.
EVENT_FLAGS: Mapping[EngineKind, str] = {
    EngineKind.VLLM: """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", """
    """"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'""",
    EngineKind.SGLANG: """--kv-events-config '{"publisher": "zmq", "endpoint": "tcp://*:5557", """
    """"replay_endpoint": "tcp://*:5657"}'""",
}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model as an engine lists it."""

    name: str  # by which requests ask for it
    parent: str | None  # of an adapter: its base model
    max_model_len: int | None  # tokens
    members: Mapping[str, Any] = field(compare=False)  # the model as it stands in the list

    @property
    def adapter(self) -> str | None:
        """The adapter's name, as KV events have it; None for a base model."""
        return None if self.parent is None else str(self.members["id"])

    @property
    def gateways(self) -> list[Any]:
        """The ids of the gateways on the way to its engine."""
        found = self.members.get(GATEWAYS)
        return found if isinstance(found, list) else []


@dataclass(frozen=True, slots=True)
class Facts:
    """An engine's answers about itself."""

    kind: EngineKind
    version: str
    models: tuple[ListedModel, ...]  # base models before adapters
    block_size: int  # tokens
    blocks: int | None  # of its KV cache, on one rank
    ranks: range
    events: Mapping[int, str]  # by rank: where it publishes
    replays: Mapping[int, str]
    renders: bool  # it returns the tokens of a whole request
    role: Role | None = None  # the phase that it is run for, if it reports one (SGLang)
    bootstrap_port: int | None = None  # where decode engines meet a prefill engine of SGLang
    started: str | None = None  # when its process was started, as it writes that; None: not known

    @property
    def names(self) -> list[str]:
        return [listed.name for listed in self.models]

    @property
    def advice(self) -> str | None:
        """Returns a sentence with the flag that makes it publish KV events; None if it does."""
        if self.events or self.kind not in EVENT_FLAGS:
            return None
        flag = EVENT_FLAGS[self.kind]
        return f"the engine reports no endpoint of KV events, so they are predicted; add {flag}"

    @property
    def context(self) -> int | None:
        """Returns the tokens of the longest request that it takes, None if it does not say so."""
        return self.models[0].max_model_len


class Probe:
    """Questions to one engine."""

    def __init__(
        self, exchanges: Exchanges, engine: int, target: Target, key: bytes, gateway_id: bytes
    ) -> None:
        """`gateway_id` is that of the gateway that asks."""
        self._gateway_id = gateway_id.decode()
        self._exchanges = exchanges
        self._engine = engine
        self._target = target
        self._key = key
        self.faults: frozenset[str] = frozenset()  # paths answered with a fault that may pass

    async def ask(self) -> Facts:
        """Returns what the engine says; raises NotAnEngine or ExchangeFailed."""
        version = await self._json("/version")
        if isinstance(version, dict) and isinstance(version.get("version"), str):
            return await self._vllm(version["version"])
        info = await self._json("/server_info")
        if isinstance(info, dict) and "page_size" in info:
            return await self._sglang(info)
        models = await self._models()
        return Facts(
            EngineKind.OPENAI, "", models, DEFAULT_BLOCK_SIZE, None, range(1), {}, {}, False
        )

    async def _vllm(self, version: str) -> Facts:
        models = await self._models()
        answer = await self._get("/metrics")
        metrics = answer.held.decode("utf-8", "replace") if answer else ""
        caches = cache_configs(metrics)
        started = STARTED.search(metrics)
        sources = await self._json("/kv_event_sources")
        events, replays = self._sources(sources if isinstance(sources, dict) else {})
        ranks = sorted({cache.get("engine", 0) for cache in caches}) or sorted(events) or [0]
        first = caches[0] if caches else {}
        blocks = first.get("num_gpu_blocks")  # of all ranks of this server together
        return Facts(
            EngineKind.VLLM,
            version[:MAX_VERSION],
            models,
            first.get("block_size") or DEFAULT_BLOCK_SIZE,
            None if blocks is None else blocks // len(ranks),
            range(ranks[0], ranks[0] + len(ranks)),
            {rank: events[rank] for rank in ranks if rank in events},
            {rank: replays[rank] for rank in ranks if rank in replays},
            await self._renders(models[0].name),
            started=started[1] if started else None,
        )

    async def _sglang(self, info: Mapping[str, Any]) -> Facts:
        page = _positive(info.get("page_size")) or 1
        size = _positive(info.get("dp_size")) or 1
        if size > MAX_RANKS:
            raise NotAnEngine(f"the engine has {size} ranks, more than the limit of {MAX_RANKS}")
        tokens = _positive(info.get("max_total_num_tokens"))
        block_size = page * (_positive(info.get("dcp_size")) or 1)
        events: dict[int, str] = {}
        replays: dict[int, str] = {}
        kv_events = info.get("kv_events")
        if isinstance(kv_events, dict) and (base := _positive(kv_events.get("endpoint_port_base"))):
            host = str(kv_events.get("endpoint_host") or "*")
            replay = _positive(kv_events.get("replay_endpoint_port_base"))
            for rank in range(size):
                events[rank] = self._reachable(f"tcp://{host}:{base + rank}")
                if replay:
                    replays[rank] = self._reachable(f"tcp://{host}:{replay + rank}")
            block_size = _positive(kv_events.get("block_size")) or block_size
        blocks = tokens // block_size if tokens else None
        version = str(info.get("version") or "")[:MAX_VERSION]
        models = tuple(
            # By its name alone it would silently be the base model.
            replace(each, name=f"{each.parent}:{each.adapter}") if each.adapter else each
            for each in await self._models()
        )
        return Facts(
            EngineKind.SGLANG,
            version,
            models,
            block_size,
            blocks,
            range(size),
            events,
            replays,
            False,
            SGLANG_ROLES.get(str(info.get("disaggregation_mode"))),
            _positive(info.get("disaggregation_bootstrap_port")),
        )

    async def _models(self) -> tuple[ListedModel, ...]:
        answer = await self._get("/v1/models")
        if answer is None:
            raise NotAnEngine("/v1/models answers 404: this is no server of OpenAI's API")
        if answer.status == 401:
            raise NotAnEngine("/v1/models needs the key of this engine: check --upstream-key-file")
        listed = _parsed(answer)
        rows = listed.get("data") if isinstance(listed, dict) else None
        if not isinstance(rows, list):
            raise NotAnEngine("/v1/models lists no model")
        models = [
            ListedModel(row["id"], row.get("parent"), _positive(row.get("max_model_len")), row)
            for row in rows
            if isinstance(row, dict) and _is_named(row.get("id"), row.get("parent") or "")
        ]
        if not models:
            raise NotAnEngine("/v1/models lists no model")
        models = [each for each in models if self._gateway_id not in each.gateways]
        if not models:
            raise NotAnEngine("it has its models from this gateway: requests would come back")
        return tuple(sorted(models, key=lambda listed: listed.parent is not None))

    def _sources(self, sources: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, str]]:
        """Returns where each global rank publishes, and where it replays."""
        events: dict[int, str] = {}
        replays: dict[int, str] = {}
        for rank, source in sources.items():
            if not WHOLE.fullmatch(rank) or not isinstance(source, dict):
                continue
            if source.get("enable_kv_cache_events") and source.get("publisher") == "zmq":
                events[int(rank)] = self._reachable(str(source.get("endpoint")))
                if source.get("replay_endpoint"):
                    replays[int(rank)] = self._reachable(str(source["replay_endpoint"]))
        return events, replays

    def _reachable(self, endpoint: str) -> str:
        """Returns an endpoint as it is reached from here: `*` becomes the host of the URL."""
        try:
            parts = urlsplit(endpoint)
            port = parts.port
        except ValueError as error:
            raise NotAnEngine(f"the engine reports the endpoint {endpoint!r}: {error}") from None
        if parts.hostname not in ("*", "0.0.0.0", "::"):
            return endpoint
        address = f"{bracketed(self._target.host)}:{port}"
        return urlunsplit((parts.scheme, address, parts.path, "", ""))

    async def _renders(self, model: str) -> bool:
        """Returns whether it renders requests in the form of vLLM 0.18 and later."""
        body = json.dumps({"model": model, "prompt": "kvd", "max_tokens": 1}).encode()
        answer = await self._post("/v1/completions/render", body)
        if answer is None or answer.status != 200:
            return False
        rendered = _parsed(answer)
        first = rendered[0] if isinstance(rendered, list) and rendered else None
        return isinstance(first, dict) and isinstance(first.get("token_ids"), list)

    async def _json(self, path: str) -> Any:
        answer = await self._get(path)
        return _parsed(answer) if answer is not None and answer.status == 200 else None

    async def _get(self, path: str) -> Answer | None:
        return await self._ask("GET", path, b"")

    async def _post(self, path: str, body: bytes) -> Answer | None:
        return await self._ask("POST", path, body)

    async def _ask(self, method: str, path: str, body: bytes) -> Answer | None:
        """Returns the answer, None for a path that the engine does not have."""
        authority = self._target.authority.encode()
        head = own_head(method, path, authority, len(body), self._key)
        with trio.move_on_after(PROBE_S):
            answer = await self._exchanges.ask(self._engine, head, body, PROBE_BYTES)
            if answer.status >= 500 or answer.status == 429:
                self.faults |= {path}
            return None if answer.status == 404 else answer
        raise Unanswered(f"{path} has not answered within {PROBE_S:g} s")


def cache_configs(metrics: str) -> list[dict[str, int]]:
    """Returns the whole numbers in the cache configurations that vLLM's metrics show, by engine."""
    found = []
    for line in CACHE_CONFIG.findall(metrics):
        labels = dict(LABEL.findall(line))
        numbers = {name: value for name, value in labels.items() if WHOLE.fullmatch(value)}
        found.append({name: int(value) for name, value in numbers.items()})
    return sorted(found, key=lambda cache: cache.get("engine", 0))


def _parsed(answer: Answer) -> Any:
    try:
        return json.loads(answer.held)
    except (ValueError, RecursionError):
        return None


def _is_named(*names: object) -> bool:
    return all(isinstance(name, str) and is_name(name) for name in names)


def _positive(value: object) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    return value if 0 < value <= MAX_COUNT else None
