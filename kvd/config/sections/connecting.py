"""What kvd connects to: engines and their replays, replicas, peers; and in which networks."""

from __future__ import annotations

from kvd.config import parsers
from kvd.config.sections.rows import I32_MAX, count, file, pause, seconds, section
from kvd.config.setting import Setting
from kvd.model import DEFAULT_TENANT
from kvd.net.dialing import LOOKUP_EVERY_S, LOOKUP_S
from kvd.net.link import LinkOptions
from kvd.net.recovery import RecoveryLimits
from kvd.net.replay import ReplayOptions
from kvd.net.replication import REPLICA_LINK
from kvd.wire import egress
from kvd.wire.stream_link import STALE_AFTER_S

WORKER_SETTINGS = section(
    block_size=Setting(
        parsers.parse_positive, "TOKENS", "block size of the workers in --workers", common=True
    ),
    model_name=Setting(
        parsers.parse_name, "NAME", "model of the workers in --workers", "default", common=True
    ),
    tenant_id=Setting(
        parsers.parse_name, "NAME", "tenant of the workers in --workers", DEFAULT_TENANT
    ),
    workers=Setting(
        parsers.parse_list,
        "ID[:RANK]=ENDPOINT[;REPLAY][;URL],...",
        "engines to subscribe to at startup: event endpoint, replay endpoint, and the URL "
        "at which the worker can be selected",
        common=True,
    ),
)

FLEET_SETTINGS = section(
    fleet_file=file(
        "TOML file of workers, publishers and replicas; kvd applies its changes while running",
        common=True,
    ),
)

PEER_SETTINGS = section(
    RecoveryLimits,
    "recovery_",
    peers=Setting(parsers.parse_peers, "URL,...", "indexers to recover the index from at startup"),
    peers_token_file=file("file with a bearer token of scope admin at the peers"),
    recovery_delay_s=pause(
        "longest wait for engines to connect, before a peer is asked for its dump",
        1.0,  # as long as Dynamo always waits
    ),
    recovery_connect_s=seconds("time allowed to connect to a peer before the next peer is asked"),
    recovery_stall_s=seconds("time allowed without receiving a byte of a peer's dump"),
    recovery_total_s=seconds("total time allowed for recovery from one peer"),
    recovery_bytes=Setting(
        parsers.within(1024 * 1024, 2**40),
        "BYTES",
        "maximum size of a peer's dump",
        field="body_bytes",
    ),
    recovery_blocks=Setting(
        parsers.within(1, I32_MAX),
        "BLOCKS",
        "maximum number of blocks in a peer's dump, and of runs of blocks; a block takes "
        "16 bytes and a run 56 until stored",
    ),
)

REPLICA_SETTINGS = section(
    replica_sync_port=Setting(
        parsers.parse_replica_port,
        "PORT",
        "port on which this process publishes its requests to replicas",
    ),
    replica_sync_host=Setting(
        parsers.parse_host,
        "HOST",
        "address of --replica-sync-port; 0.0.0.0 is every interface",
        "127.0.0.1",
    ),
    replica_sync_peers=Setting(
        parsers.parse_replica_peers,
        "ENDPOINT,...",
        "replicas to receive requests from, as tcp://HOST:PORT",
    ),
    replica_sync_queue_messages=Setting(
        parsers.within(0, I32_MAX),
        "N",
        "maximum number of events queued to and from each replica; further events are "
        "dropped; 0: unlimited",
        REPLICA_LINK.queue_messages,
    ),
)

OUTGOING_SETTINGS = section(
    outgoing_allow=Setting(
        parsers.parse_outgoing,
        "NETWORK,...",
        "networks in which kvd may connect to engines, replicas and peers: addresses such as "
        "10.0.0.0/8, private, ipc",
        egress.DEFAULT,
        live=True,
    ),
    outgoing_lookup_s=seconds("time allowed for one host name lookup", LOOKUP_S, live=True),
    outgoing_lookup_every_s=seconds(
        "pause between lookups of a host name whose connection is lost", LOOKUP_EVERY_S, live=True
    ),
)

CURVE_SETTINGS = section(
    curve_secret_key_file=file(
        "file with this process's CURVE secret key for engines and replicas",
        when_unset="a fresh key at each start",
    ),
    replica_sync_client_keys=file(
        "file with the CURVE public keys of the replicas that may subscribe to requests, "
        "one per line",
        when_unset="any replica may",
    ),
)

ENGINE_SETTINGS = section(
    LinkOptions,
    "engine_",
    engine_heartbeat_s=seconds("interval between pings of each engine and replica"),
    engine_heartbeat_timeout_s=seconds(
        "silence after which the connection to an engine or replica counts as lost"
    ),
    engine_connect_timeout_s=seconds(
        "time allowed to connect to an engine or replica before another attempt"
    ),
    engine_handshake_timeout_s=seconds(
        "time allowed for the ZMTP handshake with an engine or replica"
    ),
    engine_reconnect_s=seconds(
        "pause before the first reconnection attempt; each failure doubles the pause"
    ),
    engine_reconnect_max_s=seconds("longest pause between reconnection attempts"),
    engine_stale_s=seconds(
        "time after which a disconnected stream is stale and a silent stream is reported",
        STALE_AFTER_S,
    ),
    engine_queue_messages=Setting(
        parsers.within(0, I32_MAX),
        "N",
        "maximum number of unapplied batches of an engine; further batches are dropped and "
        "leave a gap; 0: unlimited",
    ),
    engine_queue_bytes=Setting(
        parsers.within(0, 2**40),
        "BYTES",
        "maximum size of the unapplied batches of an engine, with 16 bytes added for each "
        "batch; 0: unlimited",
    ),
    engine_message_bytes=Setting(
        parsers.within(64 * 1024, I32_MAX),  # the decoder takes no more
        "BYTES",
        "maximum size of a batch; a larger batch closes the connection",
        field="max_message_bytes",
    ),
) + section(
    ReplayOptions,
    "replay_",
    replay_idle_s=seconds("time allowed between two useful batches of a replay", live=True),
    replay_total_s=seconds(
        "total time allowed for a replay, including the wait for its turn", live=True
    ),
    replay_spare_s=pause(
        "pause before an engine is asked again after a replay that brought nothing", live=True
    ),
    replay_messages=count(
        "maximum number of messages in a replay", field="max_messages", live=True
    ),
    replay_bytes=Setting(
        parsers.within(64 * 1024, 2**40),
        "BYTES",
        "maximum size of a replay",
        field="max_bytes",
        live=True,
    ),
    replay_at_once=Setting(
        parsers.within(1, 4096),  # three descriptors each
        "N",
        "maximum number of concurrent replays",
        live=True,
    ),
)
