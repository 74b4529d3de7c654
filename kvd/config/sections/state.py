"""The index, the state that outlives the process or is shared, and which models kvd serves."""

from __future__ import annotations

from kvd.config import parsers
from kvd.config.sections.rows import count, file, section
from kvd.config.setting import Setting
from kvd.model import MAX_PARTITIONS
from kvd_core.conductor.conductor import DEFAULT_SEED

# Dumps under way, for replicas that start at once. Each takes 0.2 ms of every pass of the loop, and
# watches every chain that changes; a client that does not read is closed after 5 s.
MAX_DUMPS = 8

# Stores, evictions and clears that are remembered: by default 2 MB of them, at most 8 MB, which an
# explanation reads in some milliseconds.
DEFAULT_CHRONICLE, MAX_CHRONICLE = 65_536, 262_144

INDEX_SETTINGS = section(
    index_max_blocks=Setting(
        parsers.within(0, 2**40),
        "BLOCKS",
        "maximum number of indexed blocks over all models and tenants, and of (rank, "
        "block) pairs; 0: unlimited",
        0,
        live=True,
    ),
    index_chronicle=Setting(
        parsers.within(0, MAX_CHRONICLE),
        "CHANGES",
        "number of stores, evictions and clears of blocks remembered for `kvd explain`, over all "
        "models and tenants, 32 bytes each; 0: none",
        DEFAULT_CHRONICLE,
    ),
    max_partitions=count(
        "maximum number of (model, tenant) pairs on each face", MAX_PARTITIONS, live=True
    ),
    max_dumps=Setting(
        parsers.within(1, 1024), "N", "maximum number of concurrent dumps of the index", MAX_DUMPS
    ),
)

CONDUCTOR_SETTINGS = section(
    hash_seed=Setting(
        parsers.parse_u64,
        "SEED",
        "seed of the rolling sequence hashes shared by the conductor's publishers and clients",
        DEFAULT_SEED,
    ),
)

STATE_SETTINGS = section(
    state_dir=Setting(
        parsers.parse_state_dir,
        "DIR|off",
        "directory for the state that survives a restart: registrations made by calls, bookings, "
        "and snapshots of the index",
        when_unset="the StateDirectory of the systemd unit, or off",
        default_env="STATE_DIRECTORY",
    ),
    snapshot_s=Setting(
        parsers.parse_pause,
        "SECONDS",
        "pause between two snapshots of the index in the state directory; 0: only at shutdown",
        60.0,
    ),
)

SHARED_STATE_SETTINGS = section(
    state_url=Setting(
        parsers.parse_state_url,
        "URL",
        "Redis or Valkey server where replicas share bookings, sessions and registrations: "
        "redis://[USER@]HOST:PORT[/DB], rediss:// for TLS, redis+sentinel://HOST:PORT,.../NAME or "
        "redis+cluster://HOST:PORT,...",
        when_unset="nothing is shared",
    ),
    state_prefix=Setting(
        parsers.parse_prefix,
        "TEXT",
        "prefix of kvd's keys on the server of state_url; the same for all replicas of a fleet",
        "kvd",
    ),
    state_password_file=file("file with the password for the server of state_url"),
    state_ca_file=file(
        "file with the certificates of authorities for the server of state_url",
        when_unset="the system's authorities",
    ),
    state_advertise=Setting(
        parsers.parse_advertised,
        "URL",
        "base URL at which other replicas reach this indexer: new replicas recover the index from "
        "it, and answers with status 421 name it",
        when_unset="other replicas do not learn it",
    ),
    state_lease_s=Setting(
        parsers.parse_lease,
        "SECONDS",
        "time after which a replica counts as gone that has not renewed its lease on the server of "
        "state_url; replicas renew it, and read changed registrations, ten times as often",
        10.0,
    ),
)

PARTITION_SETTINGS = section(
    serve=Setting(
        parsers.parse_served,
        "MODEL[@TENANT],...",
        "models, or single tenants of models, that this kvd serves; requests for others are "
        "answered with 421",
        when_unset="all models",
    ),
    owners=Setting(
        parsers.parse_owners,
        "MODEL[@TENANT]=URL,...",
        "URLs of the kvds that serve other models; answers with status 421 name them",
    ),
)
