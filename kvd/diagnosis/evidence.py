"""The state of a daemon at one moment, as plain values: all that checks see.

    Evidence ─┬─ streams      of engines and publishers, those with a sign of trouble
              ├─ upstreams, kvds   of the gateway
              ├─ models       each model and tenant with an index: questions beside events
              ├─ unknown      models and tenants that were asked for and are not registered
              ├─ workers      of the selection service, those that cannot be chosen
              ├─ shares       bookings by worker, while it was busy, of each fleet
              ├─ faces        requests refused for their Host
              ├─ replicas, shared, clock
              └─ capacity, selections, expired

`watched_s` is the time over which each Growth was counted: see `kvd.diagnosis.growth`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvd.model import InstanceId, PartitionKey, RankKey
from kvd_core.zmq.drain import TOO_LARGE

Growth = int  # of a counter within the last minutes


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The result of probing an engine's address from outside."""

    fault: str = ""  # why there was no connection, "" if there was one
    received: bytes = b""  # the first bytes of the answer, from whatever listens there
    is_zmtp: bool = False  # the answer begins with a greeting of ZeroMQ
    mechanism: str = ""  # in that greeting: NULL, PLAIN or CURVE
    socket_type: str = ""  # in its READY command, "" if none came


@dataclass(frozen=True, slots=True)
class StreamEvidence:
    """The event stream of one rank or publisher."""

    subject: str
    key: PartitionKey
    endpoint: str
    replay_endpoint: str | None
    has_key: bool  # it is registered with a key of CURVE
    block_size: int  # tokens, as registered
    is_paused: bool = False
    is_connected: bool = True
    last_error: str = ""
    is_degraded: bool = False
    quiet: str = ""  # a Quiet of kvd.wire.stream_link
    quiet_s: float = 0.0
    messages: int = 0
    bad_frames: Mapping[str, int] = field(default_factory=dict)
    batches_flawed: int = 0
    flaw: str = ""  # why the last flawed batch could not be read
    joins: int = 0  # connections
    restarts: int = 0
    restarted_s: float | None = None  # seconds since the last restart
    gaps: int = 0
    lost: int = 0  # messages that are missing for good
    crashes: int = 0  # bugs; each cost a batch
    dropped: int = 0  # lost messages for which the stream's queue had no room
    replays: Mapping[str, int] = field(default_factory=dict)  # by how they ended
    strays: int = 0  # messages in replays that did not fit the request
    loss: str = ""
    ignored: Mapping[str, int] = field(default_factory=dict)  # events, by reason
    foreign: Mapping[str, int] = field(default_factory=dict)  # events, by the member that differs
    probe: ProbeResult | None = None
    replay_probe: ProbeResult | None = None

    @property
    def too_large(self) -> int:
        """The messages that were refused for their size, which nothing can bring."""
        return self.bad_frames.get(TOO_LARGE, 0)


@dataclass(frozen=True, slots=True)
class UpstreamEvidence:
    """An engine behind the gateway, or a name that leads to none."""

    url: str
    problem: str  # why it gets no requests, or why the name leads to no engine; "" if nothing
    doubt: str  # why its events are not believed, "" if they are


@dataclass(frozen=True, slots=True)
class KvdEvidence:
    """A kvd elsewhere, which chooses engines for the gateway."""

    url: str
    problem: str  # why it is not asked, "" if it is


@dataclass(frozen=True, slots=True)
class SaltUsage:
    """Salts and adapters of prompts, either in questions or in events."""

    prompts: int = 0
    salted: int = 0
    adapted: int = 0
    announcing_salts: int = 0  # prompts of engines that would have announced a salt
    first_tokens: frozenset[int] = frozenset()  # with which the latest prompts begin


@dataclass(frozen=True, slots=True)
class ModelEvidence:
    """The index of one model and tenant."""

    key: PartitionKey
    block_size: int
    blocks: int
    parked: int  # blocks without content or a parent
    questions: int
    matched: int
    is_unmatched: bool  # of enough questions, none has matched
    asked: SaltUsage
    announced: SaltUsage
    ranks: Mapping[InstanceId, frozenset[int]]  # of instances with holes in their rank numbers


@dataclass(frozen=True, slots=True)
class EndpointEvidence:
    """An address that several ranks of one model and tenant are registered with."""

    endpoint: str
    key: PartitionKey
    ranks: tuple[RankKey, ...]


@dataclass(frozen=True, slots=True)
class WorkerEvidence:
    """A worker of the selection service that cannot be chosen."""

    worker_id: int
    key: PartitionKey
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ShareEvidence:
    """The bookings of a model and tenant by worker, while the workers were busy."""

    key: PartitionKey
    bookings: Mapping[int, Growth]  # by worker, of a sample of requests
    workers: int  # number of workers that can be chosen


@dataclass(frozen=True, slots=True)
class FaceEvidence:
    """Requests that a face refused for their Host."""

    name: str
    refused: Growth
    host: str  # the Host of the last one


@dataclass(frozen=True, slots=True)
class ReplicaEvidence:
    """A replica that this process listens to."""

    endpoint: str
    away_s: float  # seconds without a connection
    last_error: str
    probe: ProbeResult | None = None


@dataclass(frozen=True, slots=True)
class SharedEvidence:
    """The shared state."""

    server: str
    is_connected: bool
    behind: int  # processes whose steps have not all arrived here
    fault: str


@dataclass(frozen=True, slots=True)
class CapacityEvidence:
    """The capacity of the index, and its use."""

    max_blocks: int = 0  # 0: no bound
    blocks: int = 0
    pairs: int = 0
    refused: int = 0  # blocks, since the start
    refused_lately: Growth = 0


@dataclass(frozen=True, slots=True)
class SelectionEvidence:
    """The outcomes of selections."""

    overloaded: Growth = 0
    queue_full: Growth = 0
    timed_out: Growth = 0
    served: Growth = 0
    waiting: int = 0
    max_waiting: int = 0


@dataclass(frozen=True, slots=True)
class ExpiredEvidence:
    """Requests that a face dropped as too old."""

    face: str
    expired: Growth
    expiry_s: float


@dataclass(frozen=True, slots=True)
class ReplicaTraffic:
    """Messages that could not be sent to replicas, and those of replicas that did not arrive."""

    overflows: Growth = 0
    missed: Growth = 0


@dataclass(frozen=True, slots=True)
class Evidence:
    """All evidence of one moment."""

    watched_s: float = 0.0  # seconds over which each Growth was counted
    streams: tuple[StreamEvidence, ...] = ()
    upstreams: tuple[UpstreamEvidence, ...] = ()
    kvds: tuple[KvdEvidence, ...] = ()
    models: tuple[ModelEvidence, ...] = ()
    registered: frozenset[PartitionKey] = frozenset()
    unknown: Mapping[PartitionKey, Growth] = field(default_factory=dict)
    endpoints: tuple[EndpointEvidence, ...] = ()
    workers: tuple[WorkerEvidence, ...] = ()
    shares: tuple[ShareEvidence, ...] = ()
    faces: tuple[FaceEvidence, ...] = ()
    capacity: CapacityEvidence = CapacityEvidence()
    selections: SelectionEvidence = SelectionEvidence()
    expired: tuple[ExpiredEvidence, ...] = ()
    replicas: tuple[ReplicaEvidence, ...] = ()
    traffic: ReplicaTraffic = ReplicaTraffic()
    shared: SharedEvidence | None = None
    fleet_faults: Mapping[str, str] = field(default_factory=dict)  # why, by file or entry
    unwritten: Mapping[str, Growth] = field(default_factory=dict)  # failed writes, by content
    clock_lead_s: float = 0.0  # the most that a replica's clock was ahead lately
