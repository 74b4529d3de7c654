"""The daemon as a whole: bounds on its requests and queues, its log and its decision log."""

from __future__ import annotations

from kvd.config import parsers
from kvd.config.sections.rows import file, section, switch
from kvd.config.setting import Setting
from kvd.net.backlog import MAX_QUEUED_BYTES, MAX_QUEUED_MESSAGES
from kvd.telemetry.logs import FORMS, LEVELS
from kvd.telemetry.rotating import MAX_FILES
from kvd_core.ledger.ledger import MAX_BLOCKS as MAX_REQUEST_BLOCKS
from kvd_core.ledger.ledger import MAX_REQUESTS

DAEMON_SETTINGS = section(
    min_initial_workers=Setting(
        parsers.parse_u32,
        "N",
        "number of instances that must register before kvd applies any events",
        0,
        env="DYN_ROUTER_MIN_INITIAL_WORKERS",
        empty_is_wrong=True,
    ),
    request_expiry_s=Setting(
        parsers.parse_positive,
        "SECONDS",
        "age at which a live request is dropped",
        300,
        env="DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS",
        live=True,
    ),
    max_requests=Setting(
        parsers.within(1, MAX_REQUESTS),
        "N",
        "maximum number of live requests per model and tenant, on the slot tracker and on "
        "the selection service each",
        MAX_REQUESTS,
    ),
    max_request_blocks=Setting(
        parsers.within(1, MAX_REQUEST_BLOCKS),
        "BLOCKS",
        "maximum number of blocks of live requests per model and tenant, on the slot "
        "tracker and the selection service together",
        MAX_REQUEST_BLOCKS,
    ),
    queues_messages=Setting(
        parsers.within(0, 2**40),
        "N",
        "maximum number of unapplied messages of all engines and replicas; 0: unlimited",
        MAX_QUEUED_MESSAGES,
    ),
    queues_bytes=Setting(
        parsers.within(0, 2**40),
        "BYTES",
        "maximum total size of the unapplied messages of all engines and replicas; 0: unlimited",
        MAX_QUEUED_BYTES,
    ),
    metrics_ranks=Setting(
        parsers.parse_u32,
        "N",
        "largest number of registered ranks for which /metrics shows loads rank by rank",
        1000,
        live=True,
    ),
)

LOG_SETTINGS = section(
    log_level=Setting(
        parsers.one_of(LEVELS),
        "|".join(LEVELS),
        "lowest level that is logged",
        "info",
        live=True,
        common=True,
    ),
    log_format=Setting(
        parsers.one_of(FORMS),
        "|".join(FORMS),
        "format of the log lines on stderr",
        "logfmt",
        live=True,
    ),
    access_log=switch("whether kvd logs every HTTP request", False, live=True),
)

DECISION_SETTINGS = section(
    decision_log=file(
        "file that records each booked choice of the selection service and the end of its "
        "request, without prompts, for `kvd replay`",
        when_unset="no record",
    ),
    decision_log_bytes=Setting(
        parsers.within(64 * 1024, 2**40),
        "BYTES",
        "size at which a new file of the decision log begins",
        64 * 1024 * 1024,
    ),
    decision_log_files=Setting(
        parsers.within(1, MAX_FILES),
        "N",
        "maximum number of files of the decision log; the oldest is removed",
        8,
    ),
)
