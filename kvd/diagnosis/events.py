"""Do events arrive whole, and do they fit the registration of their stream?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvd.diagnosis.engines import host_of
from kvd.diagnosis.evidence import StreamEvidence
from kvd.diagnosis.findings import Finding, counted, found
from kvd.wire.replay import ReplayEnd

# Reasons of ignored events that have a finding of their own.
NAMED = ("block_size", "tokens", "full")

# Ends of replays that the engine answered, and of those that nobody answered.
ANSWERED = (ReplayEnd.REACHED, ReplayEnd.MARKER, ReplayEnd.HOLE)
UNANSWERED = (ReplayEnd.SILENT, ReplayEnd.FAILED)

_OTHER_SIZE = re.compile(r"blocks of (\d+) tokens")


def check_events(stream: StreamEvidence) -> Iterator[Finding]:
    """Yields what is wrong with the events of a stream."""
    yield from _check_use(stream)
    if 0 < stream.batches_flawed < stream.messages and stream.loss:
        evidence = f"{stream.batches_flawed} of {stream.messages} batches: {stream.flaw}"
        yield found("batches_unreadable", stream.subject, evidence)
    if stream.crashes and stream.loss:
        evidence = f"{counted(stream.crashes, 'batch', 'batches')}; the stream lacks events"
        yield found("internal_error", stream.subject, f"{evidence} ({stream.loss})")
    if stream.lost and stream.loss:
        yield from _check_lost(stream)
    else:
        yield from _check_replay(stream)


def check_loss(stream: StreamEvidence) -> Iterator[Finding]:
    """Yields why a stream is degraded in which nothing else is wrong by now."""
    if stream.is_degraded:
        yield found("stream_degraded", stream.subject, stream.loss)


def _check_use(stream: StreamEvidence) -> Iterator[Finding]:
    ignored, subject = stream.ignored, stream.subject
    if sized := ignored.get("block_size", 0) + stream.foreign.get("block_size", 0):
        other = _OTHER_SIZE.search(stream.loss)
        hint = f'"block_size": {other[1]}' if other else "as its --block-size says"
        sized_events = counted(sized, "event")
        blocks = f"blocks of {other[1]} tokens" if other else "blocks of another size"
        evidence = f"{sized_events} with {blocks}, registered with {stream.block_size}"
        yield found("block_size_mismatch", subject, evidence, hint=hint, size=stream.block_size)
    if bare := ignored.get("tokens", 0):
        evidence = f"{counted(bare, 'event')} with fewer tokens than hashes need"
        yield found("tokens_missing", subject, evidence)
    for member, name in (("model_name", "model_name_mismatch"), ("tenant_id", "tenant_mismatch")):
        if count := stream.foreign.get(member, 0):
            evidence = f"{counted(count, 'event')} of another {member} than it is registered with"
            registered = stream.key.model_name if member == "model_name" else stream.key.tenant_id
            yield found(name, subject, evidence, "names", known=f"the events', or {registered}")
    for member, name in (
        ("additional_salt", "salt_one_sided"),
        ("lora_name", "adapter_one_sided"),
    ):
        if count := stream.foreign.get(member, 0):
            evidence = f"{counted(count, 'event')} with another {member} than it is registered with"
            yield found(name, subject, evidence)
    others = {why: count for why, count in ignored.items() if why not in NAMED}
    if others and stream.loss.startswith("all events were"):
        yield found("events_ignored", subject, stream.loss)


def _check_lost(stream: StreamEvidence) -> Iterator[Finding]:
    if stream.dropped:
        evidence = (
            f"{stream.dropped} batches found no room in the queue of the stream; {_lost(stream)}"
        )
        yield found("queue_full", stream.subject, evidence, "stream")
    if stream.dropped + stream.too_large + stream.crashes < stream.lost:
        yield found("messages_lost", stream.subject, _lost(stream))
    answered = sum(stream.replays.get(end, 0) for end in ANSWERED)
    unanswered = sum(stream.replays.get(end, 0) for end in UNANSWERED)
    if stream.replay_endpoint is None:
        evidence = f"no replay endpoint is registered; {_lost(stream)}"
        yield _missing(stream, evidence)
    elif answered:
        evidence = (
            f"{counted(answered, 'replay')} of {stream.replay_endpoint} brought an answer; "
            f"{_lost(stream)}"
        )
        yield found("replay_too_short", stream.subject, evidence)
    elif unanswered:
        brought = f"brought only {counted(stream.strays, 'message')} that did not fit"
        how = brought if stream.strays else "went unanswered"
        asked = f"{counted(unanswered, 'replay')} of {stream.replay_endpoint}"
        yield _missing(stream, f"{asked} {how}; {_lost(stream)}")


def _check_replay(stream: StreamEvidence) -> Iterator[Finding]:
    """Yields faults that a probe of the replay endpoint has shown, before a replay is needed."""
    probe, where = stream.replay_probe, stream.replay_endpoint
    if probe is None or not stream.is_connected:
        return
    if probe.fault:
        yield _missing(stream, f"{where}: {probe.fault}")
    elif not probe.is_zmtp:
        yield _missing(stream, f"{where} accepts connections and does not speak ZeroMQ")
    elif probe.socket_type not in ("", "ROUTER"):
        yield _missing(stream, f"{where} is a {probe.socket_type} socket, not ROUTER")


def _missing(stream: StreamEvidence, evidence: str) -> Finding:
    return found("replay_missing", stream.subject, evidence, host=host_of(stream.endpoint))


def _lost(stream: StreamEvidence) -> str:
    return (
        f"{counted(stream.lost, 'lost batch', 'lost batches')}, in {counted(stream.gaps, 'gap')} "
        f"over {counted(stream.joins, 'connection')} ({stream.loss})"
    )
