"""The gateway: its engines, who chooses for it, and its deadlines."""

from __future__ import annotations

from kvd.config import parsers
from kvd.config.sections.rows import file, pause, seconds, section, switch
from kvd.config.setting import Setting
from kvd.gateway.exchanges import RelayLimits
from kvd.gateway.pools import DEFAULT_REMOTE_TOKENS
from kvd.gateway.remote import DEFAULT_DEADLINE_S
from kvd.gateway.tokens import DEFAULT_TOKENIZE_S
from kvd.gateway.tunnels import UpstreamTls

# Processes of a gateway: more processes than cores gain nothing.
MAX_PROCESSES = 256

GATEWAY_SETTINGS = section(
    RelayLimits,
    "gateway_",
    upstreams=Setting(
        parsers.parse_upstreams,
        "URL,...",
        "engines behind the gateway, as http://HOST:PORT; dns:NAME:PORT and dns:https://NAME:PORT "
        "stand for every address of a name",
        common=True,
    ),
    prefills=Setting(
        parsers.parse_upstreams,
        "URL,...",
        "vLLM engines that compute prompts for the upstreams; SGLang's prefill engines are listed "
        "as upstreams",
        common=True,
    ),
    gateway_remote_prefill_tokens=Setting(
        parsers.at_least(0),
        "TOKENS",
        "minimum number of prompt tokens to compute, on the upstream that has most of the prompt "
        "cached, for which a prefill engine is used",
        DEFAULT_REMOTE_TOKENS,
    ),
    gateway_canary=switch(
        "whether kvd checks with a short prompt of its own that an engine's KV events match what "
        "the engine computes",
        default=True,
    ),
    upstream_key_file=file("file with the API key of the engines, for the gateway's own requests"),
    upstream_tls_ca=file(
        "PEM certificates of the authorities trusted for engines with https: URLs",
        when_unset="the system's authorities",
        options_class=UpstreamTls,
        field="ca_file",
    ),
    upstream_tls_certfile=file(
        "PEM client certificate chain, for engines with https: URLs that ask for one",
        options_class=UpstreamTls,
        field="certfile",
    ),
    upstream_tls_keyfile=file(
        "PEM private key of upstream_tls_certfile", options_class=UpstreamTls, field="keyfile"
    ),
    upstream_tls_server_name=Setting(
        parsers.parse_server_name,
        "NAME",
        "name in the certificates of engines with https: URLs",
        when_unset="the host of the URL",
        options_class=UpstreamTls,
        field="server_name",
    ),
    upstream_tls_insecure=switch(
        "whether the certificates of engines are accepted unchecked; anyone between kvd and an "
        "engine can then read and change everything",
        False,
        options_class=UpstreamTls,
        field="insecure",
    ),
    gateway_processes=Setting(
        parsers.within(1, MAX_PROCESSES),
        "N",
        "number of processes that share the gateway's port; with more than one, a further process "
        "chooses for all of them",
        1,
        also="--processes",
    ),
    gateway_kvd=Setting(
        parsers.parse_kvds,
        "URL,...",
        "kvds that choose for the gateway, as http://HOST:PORT or unix:/PATH of their selection "
        "service; the first that answers is asked",
        when_unset="this process chooses",
        also="--kvd",
    ),
    gateway_kvd_s=Setting(
        parsers.parse_seconds,
        "SECONDS",
        "time allowed for a kvd of gateway_kvd to choose; if none does, the request is routed by "
        "load",
        DEFAULT_DEADLINE_S,
    ),
    gateway_kvd_token_file=file(
        "file with the bearer token for the kvds of gateway_kvd, of scopes read, lifecycle and "
        "admin"
    ),
    gateway_body_bytes=Setting(
        parsers.within(1024, 2**31),
        "BYTES",
        "maximum size of a request body of the gateway",
        64 * 1024 * 1024,
    ),
    gateway_memory_bytes=Setting(
        parsers.within(0, 2**40),
        "BYTES",
        "memory for the token blocks of known conversations, whose next turns need not be "
        "tokenized; 0: none",
        256 * 1024 * 1024,
    ),
    gateway_tokenize_s=Setting(
        parsers.parse_seconds,
        "SECONDS",
        "time allowed for an engine to tokenize a prompt; without its tokens the request is "
        "routed by session and load",
        DEFAULT_TOKENIZE_S,
    ),
    gateway_decision_headers=switch(
        "whether answers name, in headers, the engine that served the request and the reason for "
        "the choice",
        True,
    ),
    gateway_connect_s=seconds("time allowed to connect to an engine"),
    gateway_silence_s=seconds("time an engine may send nothing before its request is abandoned"),
    gateway_client_s=seconds("time a client may read nothing before its connection is closed"),
    gateway_idle_s=pause("time an idle connection to an engine is kept; engines close after 5 s"),
    gateway_filler_s=pause(
        "time a stream may be silent before the client is sent a comment that keeps proxies from "
        "closing it; 0: never"
    ),
)
