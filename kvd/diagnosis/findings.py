"""The kinds of findings: each with a name, a severity, its meaning and a remedy.

`KINDS` is the catalog that documents, schemas and checks share. A remedy is a template whose fields
a check fills in; a kind whose remedy depends on the evidence has several, by case.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from kvd.model import PartitionKey


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"  # prompts miss blocks that are cached, or requests fail
    WARNING = "warning"  # this may happen, or will


class FindingKind(NamedTuple):
    """A kind of fault that checks can find."""

    severity: Severity
    means: str
    remedy: str | Mapping[str, str]  # by case


class Finding(NamedTuple):
    """Something that is wrong."""

    name: str  # a key of KINDS
    severity: Severity
    subject: str  # the stream, model, worker or other part that it concerns
    evidence: str  # what was observed, with numbers
    remedy: str  # a line to paste, or what to do


# In the order of the chain.
KINDS: Mapping[str, FindingKind] = {
    "engine_unreachable": FindingKind(
        Severity.ERROR,
        "nothing accepts connections at the address of an engine's events",
        'vllm serve ... --kv-events-config \'{{"enable_kv_cache_events": true, "publisher": "zmq", '
        '"endpoint": "{bind}"}}\'  # or register the right address in place of {endpoint}',
    ),
    "not_zmq": FindingKind(
        Severity.ERROR,
        "what listens there does not speak ZeroMQ, as where an engine's HTTP port is registered",
        "register the port of the engine's KV events (`endpoint` of --kv-events-config; vLLM's "
        "default is tcp://{host}:5557) in place of {endpoint}",
    ),
    "keys_differ": FindingKind(
        Severity.ERROR,
        "one side of a connection speaks CURVE and the other does not, or with other keys",
        "register the engine's public key as curve_server_key, or none if it has none",
    ),
    "not_kv_events": FindingKind(
        Severity.ERROR,
        "what is published there are no KV events, or the socket does not publish",
        "register the `endpoint` of the engine's --kv-events-config in place of {endpoint}; it is "
        "neither its replay_endpoint nor another service's",
    ),
    "message_too_large": FindingKind(
        Severity.ERROR,
        "batches are longer than engine_message_bytes allows, so they are lost",
        "raise engine_message_bytes in the file of settings, and restart kvd",
    ),
    "engine_silent": FindingKind(
        Severity.WARNING,
        "the engine is connected and has published nothing",
        'vllm serve ... --enable-prefix-caching --kv-events-config \'{{"enable_kv_cache_events": '
        'true, "publisher": "zmq"}}\'  # nothing is published before the first request either',
    ),
    "engine_restarted": FindingKind(
        Severity.WARNING,
        "the engine was started again a short while ago, and its cache began empty",
        "look at the engine's log for why it ended; kvd needs nothing",
    ),
    "upstreams_missing": FindingKind(
        Severity.ERROR,
        "the gateway has no engine, so it refuses all requests",
        "kvd gateway --upstream http://HOST:8000  # or [[upstream]] in the fleet file, or "
        "POST /upstreams",
    ),
    "upstream_unusable": FindingKind(
        Severity.ERROR,
        "an engine behind the gateway gets no requests",
        {
            "engine": "start the engine at {endpoint}, or correct --upstream; GET /status there "
            "has more",
            "name": "have the name in {endpoint} lead to the engines, as it is looked up where the "
            "gateway runs, or correct --upstream",
        },
    ),
    "kvd_unreachable": FindingKind(
        Severity.ERROR,
        "the gateway cannot ask the kvd that chooses, so requests go by load alone",
        "start kvd at {endpoint}, or correct --gateway-kvd",
    ),
    "block_size_mismatch": FindingKind(
        Severity.ERROR,
        "engine and registration have blocks of different sizes",
        "register {subject} with the engine's own block size ({hint}), or start the engine with "
        "--block-size {size}",
    ),
    "tokens_missing": FindingKind(
        Severity.ERROR,
        "events have hashes without the tokens that they stand for",
        "have the engine publish token_ids (vLLM and SGLang do); blocks known by hash alone match "
        "no prompt",
    ),
    "events_ignored": FindingKind(
        Severity.WARNING,
        "events are understood and cannot be used",
        "see docs/faces/indexer.md, Events, for what each reason means",
    ),
    "batches_unreadable": FindingKind(
        Severity.WARNING,
        "some batches cannot be decoded; what they said is not known",
        "look for event=batch_not_understood in kvd's log, and for an engine newer than this kvd",
    ),
    "internal_error": FindingKind(
        Severity.ERROR,
        "a bug or a lack of memory in kvd has cost a batch",
        "look for event=stream_crashed in kvd's log; if memory was short, allow kvd more of it, or "
        "set index_max_blocks; then restart the engine, or have all its ranks clear their caches",
    ),
    "messages_lost": FindingKind(
        Severity.ERROR,
        "batches were published that have not arrived",
        'vllm serve ... --kv-events-config \'{{"publisher": "zmq", "hwm": 1000000, '
        '"replay_endpoint": "tcp://*:5657", "buffer_steps": 100000}}\'  # the PUB socket drops '
        "beyond hwm messages",
    ),
    "queue_full": FindingKind(
        Severity.ERROR,
        "more waits here than there is room for",
        {
            "stream": "raise engine_queue_messages, engine_queue_bytes or queues_bytes; or divide "
            "the fleet (docs/scale-out.md)",
            "selections": "add workers, or raise router_queue_requests or router_queue_s",
        },
    ),
    "replay_missing": FindingKind(
        Severity.WARNING,
        "missing batches cannot be asked for: no replay endpoint, or it brings none",
        'give the engine "replay_endpoint": "tcp://*:5657" in --kv-events-config, and register '
        '"replay_endpoint": "tcp://{host}:5657" with it',
    ),
    "replay_too_short": FindingKind(
        Severity.WARNING,
        "the engine's replay buffer does not reach back to what is missing",
        'raise "buffer_steps" in the engine\'s --kv-events-config; vLLM has 10000 batches',
    ),
    "stream_degraded": FindingKind(
        Severity.WARNING,
        "events are missing for good: evicted blocks may be credited, and stored ones missed",
        "restart the engine, or have all its ranks clear their caches",
    ),
    "fleet_not_applied": FindingKind(
        Severity.ERROR,
        "the fleet file, or an entry of it, is not in force: what it said before still is",
        "correct the file (`kvd config check --fleet-file FILE` names its first mistake), or "
        "unregister what a client has in the entry's place; then save the file, or reload kvd",
    ),
    "model_name_mismatch": FindingKind(
        Severity.ERROR,
        "a model is asked for, or published, under a name that is not registered",
        {
            "names": "use one name on both sides: {known}",
            "nobody": "register the workers of {known}: in the settings, the fleet file or a call",
        },
    ),
    "tenant_mismatch": FindingKind(
        Severity.ERROR,
        "a model is asked for, or published, under a tenant it is not registered for",
        "use one tenant_id on both sides: {known}",
    ),
    "rank_missing": FindingKind(
        Severity.ERROR,
        "data-parallel ranks are not registered, so what they cache is not known",
        "register each rank with its own endpoint (vLLM adds the dp rank to the port): {ranks}",
    ),
    "endpoint_shared": FindingKind(
        Severity.WARNING,
        "several workers or ranks are registered with one address, so that each of them seems to "
        "cache what one does",
        "register each worker and rank with its own endpoint (vLLM adds the dp rank to the port)",
    ),
    "worker_unschedulable": FindingKind(
        Severity.ERROR,
        "a worker of the selection service cannot be chosen",
        "register it again with what is missing",
    ),
    "index_full": FindingKind(
        Severity.ERROR,
        "the index refuses blocks, so prompts miss what engines cache",
        {
            "blocks": "index_max_blocks = {blocks}  # 60 bytes each, then kvd reload",
            "hashes": "see docs/faces/conductor.md: hashes wait for tokens or a parent",
        },
    ),
    "salt_one_sided": FindingKind(
        Severity.ERROR,
        "cache salts stand in questions only, or in events only",
        "send the request's own cache_salt in both: \"cache_salt\" of the engine's request and of "
        "the question to kvd",
    ),
    "adapter_one_sided": FindingKind(
        Severity.ERROR,
        "adapters stand in questions only, or in events only",
        'send the adapter\'s name as "lora_name" of the question, as the engine calls it',
    ),
    "tokens_disagree": FindingKind(
        Severity.ERROR,
        "questions and engines begin prompts with different tokens: another tokenizer or template",
        'compare with the engine\'s own: curl ENGINE/tokenize -d \'{{"model": ..., "messages": '
        "...}}'; apply the chat template, with or without the special tokens at its beginning",
    ),
    "no_match_ever": FindingKind(
        Severity.ERROR,
        "no question has ever matched, and no engine has stored the prompt of one, although blocks "
        "are held",
        {
            "tokens": "compare token_ids of a question with those of an event, block by block",
            "hashes": "compute hashes as docs/identifiers.md says, with blocks of {size} tokens, "
            "or send token_ids to /query",
        },
    ),
    "host_refused": FindingKind(
        Severity.WARNING,
        "requests were refused with 421: their Host is not a name of this server",
        'allowed_hosts = ["{host}"]  # in the file of settings; or --allowed-hosts {host}',
    ),
    "load_one_sided": FindingKind(
        Severity.WARNING,
        "one worker gets nearly all requests, and others that could serve them get none",
        "have clients free their requests and complete prefills, so that load is known; look at "
        "overlap_score_credit and router_temperature of the policy",
    ),
    "all_overloaded": FindingKind(
        Severity.ERROR,
        "selections are refused because every worker is above its thresholds",
        "raise or remove the thresholds: POST /busy_threshold with the model and higher values, or "
        "the router_*_threshold settings; or add workers",
    ),
    "reservations_expire": FindingKind(
        Severity.WARNING,
        "requests are dropped as too old: nobody has freed them, and they weigh on their workers",
        "call free when a request ends, also when its client leaves; raise request_expiry_s "
        "({expiry_s:g}) if requests run longer",
    ),
    "replica_behind": FindingKind(
        Severity.WARNING,
        "what other replicas book is not known here, or not all of it",
        {
            "replica": "start it with --replica-sync-port, or register where it publishes",
            "queue": "raise replica_sync_queue_messages, or share state (docs/scale-out.md)",
            "server": "start the server, or correct state_url",
            "steps": "nothing, if it ends within a minute; else restart this kvd",
        },
    ),
    "clock_skew": FindingKind(
        Severity.WARNING,
        "a replica's clock is ahead of ours, so its session bindings win over newer ones",
        "timedatectl set-ntp true  # on the hosts of all replicas",
    ),
    "files_not_written": FindingKind(
        Severity.WARNING,
        "the state directory or the decision log cannot be written, so a restart forgets more, or "
        "choices are not recorded",
        "make room, or let the user of kvd write there: event=state_failed or decision_log_failed "
        "of the log has the path and the reason",
    ),
}


def found(name: str, subject: str, evidence: str, case: str = "", **fields: object) -> Finding:
    """Returns a finding of a kind, with `fields` filled into its remedy."""
    kind = KINDS[name]
    template = kind.remedy if isinstance(kind.remedy, str) else kind.remedy[case]
    remedy = template.format(subject=subject, **fields)
    return Finding(name, kind.severity, subject, evidence, remedy)


def partition_name(key: PartitionKey) -> str:
    """Returns the name of a model and tenant in findings."""
    return f"{key.model_name}/{key.tenant_id}"


def minutes(seconds: float) -> str:
    """Returns a duration in words, with its unit."""
    return f"{seconds:.0f} s" if seconds < 120.0 else f"{seconds / 60:.0f} minutes"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Returns a number and its noun, whose plural has an s unless given."""
    return f"{number} {noun}" if number == 1 else f"{number} {plural or f'{noun}s'}"
