"""The engines behind the gateway: who they are, what they serve, whether they are well.

    UNKNOWN ── probed ──> SERVING <── a health check succeeds ── OUT
       ^                     └── refused, reset, 3 failed health checks ──^
       └──────────── well again: asked anew, as another engine may be there now

An upstream is a worker of the selection service, by an id made of its URL, so that it is the same
worker after a restart and for every gateway.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b

import trio

from kvd.errors import KvdError, NotFound
from kvd.gateway.exchanges import ExchangeFailed, Exchanges
from kvd.gateway.heads import own_head
from kvd.gateway.probing import Facts, Kind, NotAnEngine, Probe
from kvd.model import DEFAULT_TENANT
from kvd.net.dialing import Dialer, Unreachable
from kvd.selection.service import Selections
from kvd.selection.worker_record import WorkerRecord
from kvd.telemetry.logs import get_logger
from kvd.wire.urls import Target, parse_url

HEALTH_S = 5.0  # pause between two health checks of an engine
# Pause before the second try to reach an engine that is out; each next one is twice as long.
RETRY_S = 0.1
HEALTH_TIMEOUT_S = 3.0
MAX_FAILURES = 3  # health checks in a row before a serving engine is out
REFRESH_S = 30.0  # pause between two questions to a serving engine of what it serves
HEALTH_BYTES = 64 * 1024  # of an answer to a health check

log = get_logger(__name__)


class Standing(StrEnum):
    """Whether requests are sent to an engine."""

    UNKNOWN = "unknown"  # it has not said yet what it is
    SERVING = "serving"
    OUT = "out"  # it did not answer


@dataclass(eq=False, slots=True)
class Upstream:
    """One engine."""

    url: str
    target: Target
    worker_id: int
    key: bytes = b""  # its API key, shown with requests of the gateway's own
    engine: int | None = None  # its number in the relay, once its address is known
    address: str | None = None
    standing: Standing = Standing.UNKNOWN
    facts: Facts | None = None
    problem: str | None = None  # why requests are not sent there, for operators
    failures: int = 0  # health checks in a row
    asked_at: float = 0.0  # when it last said what it is, seconds of trio's clock
    failed: trio.Event = field(default_factory=trio.Event)  # a request found it gone

    @property
    def authority(self) -> bytes:
        return self.target.authority.encode()

    def note_gone(self, why: str) -> None:
        """Takes it out until a health check succeeds, which comes at once."""
        if self.standing is Standing.SERVING:
            log.warning("upstream_out", url=self.url, reason=why)
            self.standing, self.problem = Standing.OUT, why
            self.failed.set()


@dataclass(frozen=True, slots=True)
class Served:
    """What a model's name in a request stands for."""

    model: str  # of the fleet in the selection service
    adapter: str | None = None


class Upstreams:
    """All engines of a gateway, followed by a task each."""

    def __init__(
        self,
        urls: Iterable[str],
        exchanges: Exchanges,
        selections: Selections,
        dialer: Dialer,
        key: bytes = b"",
    ) -> None:
        """Raises ValueError for a URL that none can have."""
        self.each = {one.worker_id: one for one in (_upstream(url, key) for url in urls)}
        self._exchanges = exchanges
        self._selections = selections
        self._dialer = dialer
        self._changing = trio.Lock()
        self.names: dict[str, Served] = {}  # by the names that clients may use

    def __iter__(self) -> Iterator[Upstream]:
        return iter(self.each.values())

    async def run(self) -> None:
        """Follows every engine until it is cancelled."""
        async with trio.open_nursery() as nursery:
            for upstream in self:
                nursery.start_soon(self._watch, upstream)

    def serving(self, served: Served) -> list[Upstream]:
        """Returns the engines that serve a model and are well."""
        return [
            upstream
            for upstream in self
            if upstream.standing is Standing.SERVING
            and upstream.facts is not None
            and upstream.facts.serves(served.adapter or served.model)
        ]

    def only_name(self) -> str | None:
        """Returns the one base model there is, None for any other number of them."""
        bases = {served.model for served in self.names.values()}
        return next(iter(bases)) if len(bases) == 1 else None

    async def _watch(self, upstream: Upstream) -> None:
        retry_s = RETRY_S
        while True:
            upstream.failed = trio.Event()
            if upstream.standing is Standing.SERVING:
                await self._check(upstream)
            else:
                await self._meet(upstream)
            serving = upstream.standing is Standing.SERVING
            retry_s = RETRY_S if serving else min(2 * retry_s, HEALTH_S)
            with trio.move_on_after(HEALTH_S if serving else retry_s):
                await upstream.failed.wait()

    async def _meet(self, upstream: Upstream) -> None:
        """Reaches an engine and asks it what it is."""
        try:
            await self._resolve(upstream)
            if not await self._is_well(upstream):
                raise NotAnEngine(upstream.problem or "its health check failed")
            facts = await self._ask(upstream)
        except (NotAnEngine, ExchangeFailed, Unreachable, KvdError) as error:
            if upstream.problem != str(error):
                log.warning("upstream_unusable", url=upstream.url, reason=error)
            upstream.problem = str(error)
            return
        upstream.standing, upstream.problem, upstream.failures = Standing.SERVING, None, 0
        log.info(
            "upstream_serving",
            url=upstream.url,
            engine=facts.kind.value,
            models=",".join(facts.names),
            block_size=facts.block_size,
            events=len(facts.events),
        )

    async def _ask(self, upstream: Upstream) -> Facts:
        """Asks an engine what it is, and has the selection service know it."""
        assert upstream.engine is not None
        facts = await Probe(self._exchanges, upstream.engine, upstream.target, upstream.key).ask()
        await self._register(upstream, facts)
        upstream.asked_at = trio.current_time()
        self._name()
        return facts

    async def _resolve(self, upstream: Upstream) -> None:
        address, *_ = await self._dialer.addresses(upstream.target.host)
        relay = self._exchanges.relay
        if upstream.engine is None:
            upstream.engine = relay.add_engine(address, upstream.target.port)
        elif address != upstream.address:
            relay.move_engine(upstream.engine, address, upstream.target.port)
        upstream.address = address

    async def _check(self, upstream: Upstream) -> None:
        if not await self._is_well(upstream):
            upstream.failures += 1
            if upstream.failures >= MAX_FAILURES:
                upstream.note_gone(upstream.problem or "its health checks failed")
            return
        upstream.failures = 0
        if trio.current_time() - upstream.asked_at >= REFRESH_S:
            try:
                await self._ask(upstream)  # adapters come and go
            except (NotAnEngine, ExchangeFailed, KvdError) as error:
                upstream.note_gone(str(error))

    async def _is_well(self, upstream: Upstream) -> bool:
        """Asks for its health, which costs it nothing; the reason of a failure is its problem."""
        assert upstream.engine is not None
        path = "/ready" if upstream.facts and upstream.facts.kind is Kind.SGLANG else "/health"
        head = own_head("GET", path, upstream.authority, 0, upstream.key)
        status = 0
        try:
            with trio.move_on_after(HEALTH_TIMEOUT_S):
                answer = await self._exchanges.ask(upstream.engine, head, b"", HEALTH_BYTES)
                status = answer.status
        except ExchangeFailed as error:
            upstream.problem = str(error)
            return False
        if status in (200, 204, 404):  # 404: an engine without that path answers at least
            upstream.problem = None
            return True
        upstream.problem = f"{path} answers {status}" if status else f"{path} does not answer"
        return False

    async def _register(self, upstream: Upstream, facts: Facts) -> None:
        """Makes it a worker, or the worker anew if it says other things than before."""
        async with self._changing:
            record = record_of(upstream, facts)
            known = self._selections.workers.entries.get(upstream.worker_id)
            if known is None or known.record != record:
                if known is not None and not known.reasons:
                    await self._selections.workers.delete(upstream.worker_id)
                entry = await self._selections.workers.put(record)
                if entry.reasons:
                    raise NotAnEngine("; ".join(entry.reasons))
            upstream.facts = facts

    def _name(self) -> None:
        """Finds what each name stands for now."""
        self.names = {}
        for upstream in self:
            if upstream.facts is None:
                continue
            base = upstream.facts.models[0].name
            for card in upstream.facts.models:
                adapter = card.name if card.parent is not None else None
                self.names.setdefault(card.name, Served(base, adapter))

    async def remove(self, upstream: Upstream) -> None:
        """Forgets an engine; what is under way with it goes on."""
        del self.each[upstream.worker_id]
        with suppress(NotFound):  # it never was one
            await self._selections.workers.delete(upstream.worker_id)
        if upstream.engine is not None:
            self._exchanges.relay.remove_engine(upstream.engine)
        self._name()


def _upstream(url: str, key: bytes) -> Upstream:
    target = parse_url(url)
    if target.path != "/":
        raise ValueError("the URL of an upstream has no path: give http://HOST:PORT")
    if target.tls:
        raise ValueError("upstreams are reached by http: only")
    # 53 bits, so that every reader of JSON keeps them.
    digest = blake2b(target.authority.encode(), digest_size=8).digest()
    worker_id = int.from_bytes(digest, "big") >> 11
    return Upstream(url, target, worker_id, key)


def record_of(upstream: Upstream, facts: Facts) -> WorkerRecord:
    """Returns the worker that an engine is."""
    record = WorkerRecord(
        worker_id=upstream.worker_id,
        model_name=facts.models[0].name,
        tenant_id=DEFAULT_TENANT,
        endpoint=upstream.url,
        block_size=facts.block_size,
        data_parallel_start_rank=facts.ranks.start,
        data_parallel_size=len(facts.ranks),
        total_kv_blocks=facts.blocks,
    )
    events: Mapping[int, str] = facts.events
    if len(events) < len(facts.ranks):  # what it caches is predicted from what it is sent
        return replace(record, without_kv_events=True)
    if len(facts.ranks) == 1:
        rank = facts.ranks.start
        return replace(
            record, kv_events_endpoint=events.get(rank), replay_endpoint=facts.replays.get(rank)
        )
    return replace(record, kv_events_endpoints=dict(events))
