"""The addresses of the faces, which clients may use them, and the bounds of their requests."""

from __future__ import annotations

from functools import partial

from kvd.config import parsers
from kvd.config.binds import Binds, TcpBind, parse_face_binds
from kvd.config.parsers import OFF
from kvd.config.sections.rows import file, seconds, section, switch
from kvd.config.setting import Setting
from kvd.http.limits import DEFAULT_BODY_LIMIT, HttpLimits

# The ports of the originals, on loopback only.
DEFAULT_INDEXER_BIND = TcpBind("127.0.0.1", 8090)
DEFAULT_SLOT_TRACKER_BIND = TcpBind("127.0.0.1", 8091)
DEFAULT_SELECTION_BIND = TcpBind("127.0.0.1", 8092)
DEFAULT_CONDUCTOR_BIND = TcpBind("127.0.0.1", 13333)
DEFAULT_GATEWAY_BIND = TcpBind("127.0.0.1", 8080)

# The fast path reads heads up to these bounds, whatever the settings (kvd/http/plain_head.hpp).
LEAST_HEAD_BYTES, LEAST_HEADERS = 4096, 48

# Microseconds in which the next request of a client on this machine, or near it, arrives.
MAX_BUSY_WAIT_US = 1000

binds = partial(Setting, parse_face_binds, "[tls:]HOST:PORT|unix:PATH,...|off", common=True)

BIND_SETTINGS = section(
    indexer_bind=binds("addresses of the KV indexer", Binds((DEFAULT_INDEXER_BIND,))),
    slot_tracker_bind=binds("addresses of the slot tracker", Binds((DEFAULT_SLOT_TRACKER_BIND,))),
    selection_bind=binds("addresses of the selection service", Binds((DEFAULT_SELECTION_BIND,))),
    conductor_bind=binds("addresses of the conductor", Binds((DEFAULT_CONDUCTOR_BIND,))),
    gateway_bind=binds("addresses of the gateway", OFF),
)

SECURITY_SETTINGS = section(
    tls_certfile=file("PEM certificate chain of tls: addresses", live=True, common=True),
    tls_keyfile=file("PEM private key of tls: addresses", live=True, common=True),
    tls_client_ca=file(
        "PEM certificates of the authorities whose client certificates tls: addresses require",
        live=True,
    ),
    unix_socket_mode=Setting(
        parsers.parse_file_mode, "MODE", "file mode of the sockets of unix: addresses", "0660"
    ),
    unix_socket_group=Setting(
        parsers.parse_group,
        "GROUP",
        "name or number of the group that owns the sockets of unix: addresses",
    ),
    tokens_file=file(
        "file of bearer tokens with their scopes; every client needs one of them; see "
        "docs/security.md",
        live=True,
        common=True,
    ),
    allow_unauthenticated=switch(
        "whether addresses beyond this machine may serve unauthenticated clients", False
    ),
    allowed_hosts=Setting(
        parsers.parse_hosts,
        "NAME,...",
        "further names, in the Host header, that kvd accepts on the loopback interface",
        live=True,
    ),
    allowed_origins=Setting(
        parsers.parse_origins,
        "ORIGIN,...",
        "origins of the web pages that may send requests",
        live=True,
    ),
)

HTTP_SETTINGS = section(
    HttpLimits,
    "http_",
    http_connections=Setting(
        parsers.parse_positive, "N", "maximum number of HTTP connections per listener", live=True
    ),
    http_idle_s=seconds("time after which an idle HTTP connection is closed", live=True),
    http_graceful_s=seconds("time allowed for open requests to finish at shutdown", live=True),
    http_body_bytes=Setting(
        parsers.at_least(DEFAULT_BODY_LIMIT),
        "BYTES",
        "maximum size of the body of a query or of a worker registration; other bodies may "
        "have 2 MiB",
    ),
    http_bodies_bytes=Setting(
        parsers.at_least(DEFAULT_BODY_LIMIT),
        "BYTES",
        "maximum total size of the request bodies that a listener is receiving",
    ),
    http_head_bytes=Setting(
        parsers.at_least(LEAST_HEAD_BYTES), "BYTES", "maximum size of a request head"
    ),
    http_headers=Setting(
        parsers.at_least(LEAST_HEADERS), "N", "maximum number of headers of a request"
    ),
    http_url_bytes=Setting(
        parsers.at_least(LEAST_HEAD_BYTES), "BYTES", "maximum length of the request target"
    ),
    http_head_s=seconds("time allowed to receive a request head"),
    http_body_s=seconds("time allowed to receive a request body"),
    http_handler_s=seconds("time allowed for a handler to begin its answer"),
    http_send_s=seconds("time allowed without the client reading a byte of the answer"),
    http_linger_s=seconds(
        "time a refused client may keep sending before its connection is closed",
    ),
    http_busy_wait_us=Setting(
        parsers.within(0, MAX_BUSY_WAIT_US),
        "N",
        "longest time in microseconds for which kvd waits awake for the next request, while "
        "requests come that fast and the machine has a core to spare; 0: never",
    ),
)
