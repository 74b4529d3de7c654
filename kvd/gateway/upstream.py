"""One engine behind the gateway: its state, what it has said of itself, the worker it stands for.

kvd.gateway.upstreams follows engines and changes them; requests may find that one has gone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

import trio

from kvd.gateway.dns_names import Wanted
from kvd.gateway.exchanges import IN_DOUBT, ExchangeFailed
from kvd.gateway.heads import credentials, request_head
from kvd.gateway.probing import GATEWAY_HEADER, EngineKind, Facts
from kvd.gateway.tunnels import Tunnel
from kvd.http.relayed import RelayedRequest
from kvd.model import DEFAULT_TENANT
from kvd.selection.worker_record import Role, WorkerRecord
from kvd.telemetry.logs import get_logger
from kvd.wire.urls import Target, parse_upstream
from kvd_core.relay.relay import ExchangeOutcome

# Shortest pause before an engine is asked again, where a request shows that its answer is outdated.
ASK_ANEW_S = 1.0

log = get_logger(__name__)


class UpstreamState(StrEnum):
    """The state of an engine: whether requests are sent to it."""

    UNKNOWN = "unknown"  # it has not said yet what it is
    SERVING = "serving"
    OUT = "out"  # it did not answer


@dataclass(eq=False, slots=True)
class Upstream:
    """One engine."""

    url: str
    target: Target
    worker_id: int
    gateway_id: bytes = b""  # of the gateway whose engine it is
    key: bytes = b""  # its API key, shown with requests of the gateway's own
    prefills: bool = False  # the operator says that it computes prompts for others
    server_name: str | None = None  # in its certificate; None: the host of the URL
    host_judged: bool = False  # whether the host that it names for handing over was checked
    # Its number in the relay, once its address is known and until it has left.
    engine: int | None = None
    tunnel: Tunnel | None = None  # the way to an engine with TLS, once its address is known
    address: str | None = None
    unreached: bool = False  # the last health check got no answer from this address
    state: UpstreamState = UpstreamState.UNKNOWN
    facts: Facts | None = None
    problem: str | None = None  # why requests are not sent there, for operators
    # It is out for a request that it has not answered well, and has not been asked since.
    in_doubt: bool = False
    # Where it has the cache that is known or predicted; None: nowhere, as its process has ended.
    cache_address: str | None = None
    failures: int = 0  # failed health checks in a row
    faults: frozenset[str] = frozenset()  # paths that it answers with a fault, as if it had none
    doubts: int = 0  # times in a row that other paths were answered so
    asked_at: float = 0.0  # when it was last asked what it is, seconds of trio's clock
    ask_at: float = 0.0  # when it is to be asked next
    advice: str | None = None  # what to change so that kvd learns more of it, for operators
    owners: set[str] = field(default_factory=set)  # who wants it
    following: trio.CancelScope = field(default_factory=trio.CancelScope)
    # Wakes its task: a request has found it gone, or serving something else.
    failed: trio.Event = field(default_factory=trio.Event)
    met: trio.Event = field(default_factory=trio.Event)  # it has been asked once, with any outcome
    # Called when its state changes, or what it says of itself.
    changed: Callable[[], None] = field(default=lambda: None)

    @property
    def authority(self) -> bytes:
        return self.target.authority.encode()

    @property
    def may_keep(self) -> bool:
        """Returns whether responses that it has kept may still be there: it is well or in doubt."""
        return self.state is UpstreamState.SERVING or self.in_doubt

    @property
    def role(self) -> Role | None:
        """Returns the phase of requests that it serves, None for all."""
        if self.prefills:
            return Role.PREFILL
        return None if self.facts is None else self.facts.role

    def head(
        self, request: RelayedRequest, request_id: bytes, length: int, dp_rank: int | None
    ) -> bytes:
        """Returns the head of a client's request as this engine gets it.

        The body has `length` bytes. If `dp_rank` is None, the engine chooses the rank itself.
        """
        assert self.facts is not None
        own, without = credentials(request, self.key)
        if dp_rank is not None and len(self.facts.ranks) > 1:
            rank = dp_rank - self.facts.ranks.start  # the engine numbers its ranks from 0
            own.append((b"x-data-parallel-rank", b"%d" % rank))
        if self.facts.kind is EngineKind.OPENAI:  # as which a gateway appears
            passed = [value for name, value in request.headers if name == GATEWAY_HEADER]
            own.append((GATEWAY_HEADER, b", ".join((*passed, self.gateway_id))))
        return request_head(
            request.method,
            request.target,
            request.headers,
            self.authority,
            length,
            request_id,
            own,
            without,
        )

    def note_gone(self, why: str, outcome: ExchangeOutcome | None = None) -> None:
        """Marks it as out until a health check succeeds; the next one follows at once.

        `outcome` is that of the exchange that has failed, None if the engine itself has said why.
        """
        if self.state is UpstreamState.SERVING:
            self._take_out(self.fault_of(why), in_doubt=outcome in IN_DOUBT)
            self.failed.set()

    def note_shutting_down(self) -> None:
        """Marks it as out until its next health check is due: until it ends, all succeed."""
        if self.state is UpstreamState.SERVING:
            self._take_out("it shuts down, and refuses all requests", in_doubt=True)

    def _take_out(self, why: str, *, in_doubt: bool) -> None:
        log.warning("upstream_out", url=self.url, reason=why)
        self.state, self.problem, self.in_doubt = UpstreamState.OUT, why, in_doubt
        self.changed()

    def note_ended(self) -> None:
        """Notes that nothing listens at its present address: its process there has ended."""
        if self.cache_address == self.address:
            self.cache_address = None

    def note_answered(self) -> bool:
        """Notes that it answers; returns whether it has another cache than it had before."""
        before, self.cache_address = self.cache_address, self.address
        return before != self.address

    def ask_anew(self) -> None:
        """Has it asked what it serves as soon as ASK_ANEW_S have passed since it was last asked."""
        if self.ask_at > self.asked_at + ASK_ANEW_S:
            self.ask_at = self.asked_at + ASK_ANEW_S
            self.failed.set()

    def fault_of(self, why: str) -> str:
        """Returns what is wrong with it; with TLS the tunnel knows more than the relay."""
        return why if self.tunnel is None else self.tunnel.problem or why

    def outcome_of(self, outcome: ExchangeOutcome) -> ExchangeOutcome:
        """Returns how an exchange with it went; with TLS the tunnel knows why none was answered."""
        if self.tunnel is None or outcome is not ExchangeOutcome.NO_ANSWER:
            return outcome
        return self.tunnel.unanswered

    def lacks_room(self, error: ExchangeFailed) -> bool:
        """Returns whether a question has failed for want of something in this process."""
        return self.outcome_of(error.outcome) is ExchangeOutcome.NO_ROOM


def worker_id_of(target: Target) -> int:
    """Returns the id of the worker at an address: 53 bits, which any JSON parser reads exactly."""
    address = f"https://{target.authority}" if target.tls else target.authority
    digest = hashlib.blake2b(address.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 11


def upstream_of(
    wanted: Wanted, gateway_id: bytes, key: bytes, changed: Callable[[], None]
) -> Upstream:
    """Returns the engine at the URL that is wanted; `changed` is called when its state changes."""
    target = parse_upstream(wanted.url)
    return Upstream(
        wanted.url,
        target,
        worker_id_of(target),
        gateway_id,
        key,
        prefills=wanted.prefills,
        server_name=wanted.server_name,
        changed=changed,
    )


def record_of(upstream: Upstream, facts: Facts) -> WorkerRecord:
    """Returns the record that describes an engine as a worker."""
    record = WorkerRecord(
        worker_id=upstream.worker_id,
        model_name=facts.models[0].name,
        tenant_id=DEFAULT_TENANT,
        endpoint=upstream.url,
        block_size=facts.block_size,
        data_parallel_start_rank=facts.ranks.start,
        data_parallel_size=len(facts.ranks),
        total_kv_blocks=facts.blocks,
        role=Role.PREFILL if upstream.prefills else facts.role,
    )
    events: Mapping[int, str] = facts.events
    if len(events) < len(facts.ranks):  # its cache is predicted from the prompts it is sent
        return replace(record, without_kv_events=True)
    if len(facts.ranks) == 1:
        rank = facts.ranks.start
        return replace(
            record, kv_events_endpoint=events.get(rank), replay_endpoint=facts.replays.get(rank)
        )
    return replace(record, kv_events_endpoints=dict(events))
