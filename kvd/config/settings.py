"""The settings of the daemon: each has one row in `kvd.config.sections`, with everything about it.

`--indexer-bind` of the command line is `KVD_INDEXER_BIND` in the environment and `indexer_bind`
in the configuration file and in code. `kvd.config.sources` finds their values, of which
`kvd.config.load` makes the `Config`.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.config.sections.connecting import (
    CURVE_SETTINGS,
    ENGINE_SETTINGS,
    FLEET_SETTINGS,
    OUTGOING_SETTINGS,
    PEER_SETTINGS,
    REPLICA_SETTINGS,
    WORKER_SETTINGS,
)
from kvd.config.sections.gateway import GATEWAY_SETTINGS
from kvd.config.sections.listening import BIND_SETTINGS, HTTP_SETTINGS, SECURITY_SETTINGS
from kvd.config.sections.process import DAEMON_SETTINGS, DECISION_SETTINGS, LOG_SETTINGS
from kvd.config.sections.routing import ROUTER_SETTINGS
from kvd.config.sections.state import (
    CONDUCTOR_SETTINGS,
    INDEX_SETTINGS,
    PARTITION_SETTINGS,
    SHARED_STATE_SETTINGS,
    STATE_SETTINGS,
)
from kvd.selection.policies import Policy, RouterPolicy

# Settings of every command that serves a face.
FACE_SETTINGS = (
    *SECURITY_SETTINGS,
    *FLEET_SETTINGS,
    *OUTGOING_SETTINGS,
    *CURVE_SETTINGS,
    *STATE_SETTINGS,
    *SHARED_STATE_SETTINGS,
    *PARTITION_SETTINGS,
)

_AS_ORIGINAL = {"router_last_token": False, "router_policy": Policy(RouterPolicy.DYNAMO)}

# Settings of `kvd select-service`, with its own names for the addresses and peers. By default it
# chooses exactly as the original does, even between equals.
SELECT_SERVICE_SETTINGS = (
    *REPLICA_SETTINGS,
    *(
        replace(setting, default=_AS_ORIGINAL.get(setting.name, setting.default))
        for setting in ROUTER_SETTINGS
    ),
    *(setting for setting in DAEMON_SETTINGS if setting.is_borrowed),
)

# Options of Dynamo's router without an equivalent here, by flag without the dashes, and why. kvd
# accepts them with a warning, so that one command line and one environment do for both.
_NO_NATS = "kvd has no event store; --peers names the indexers to recover from"
_NO_CACHE = "kvd caches no selections; retries need an Idempotency-Key"
_NO_KEYS = "kvd hashes prompts without a key"
WITHOUT_EFFECT = {
    "router-replica-sync": "--replica-sync-port and --replica-sync-peers set up replicas",
    "kv-cache-block-size": "each registration states the block size of its worker",
    "router-durable-kv-events": _NO_NATS,
    "router-reset-states": _NO_NATS,
    "router-snapshot-threshold": _NO_NATS,
    "event-plane": "kvd receives events over ZMQ only",
    "selection-cache-ttl-secs": _NO_CACHE,
    "selection-cache-max-entries": _NO_CACHE,
    "selection-cache-max-bytes": _NO_CACHE,
    "router-tracking-hash": _NO_KEYS,
    "router-tracking-key-file": _NO_KEYS,
    "router-tracking-key-id": _NO_KEYS,
}

# The most used settings: the help of a command shows them first, together with the flags that are
# no settings.
COMMON = "Common"

# By subject, in the order of the help, the manual and the documentation.
GROUPS = {
    COMMON: (*BIND_SETTINGS, *WORKER_SETTINGS, *LOG_SETTINGS),
    "Recovery": PEER_SETTINGS,
    "Replicas": REPLICA_SETTINGS,
    "Routing": ROUTER_SETTINGS,
    "The conductor": CONDUCTOR_SETTINGS,
    "The gateway": GATEWAY_SETTINGS,
    "Who may connect": SECURITY_SETTINGS,
    "The fleet file": FLEET_SETTINGS,
    "Outgoing connections": OUTGOING_SETTINGS,
    "CURVE": CURVE_SETTINGS,
    "Engines and replays": ENGINE_SETTINGS,
    "The index": INDEX_SETTINGS,
    "HTTP limits": HTTP_SETTINGS,
    "State that outlives the process": STATE_SETTINGS,
    "State that replicas share": SHARED_STATE_SETTINGS,
    "A fleet divided among several kvds": PARTITION_SETTINGS,
    "The decision log": DECISION_SETTINGS,
    "The daemon": DAEMON_SETTINGS,
}
SETTINGS = tuple(setting for group in GROUPS.values() for setting in group)
