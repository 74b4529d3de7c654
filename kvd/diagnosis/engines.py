"""Is an engine there, does it speak ZeroMQ, and does it publish anything?"""

from __future__ import annotations

from collections.abc import Iterator

from kvd.diagnosis.evidence import ProbeResult, StreamEvidence
from kvd.diagnosis.findings import Finding, counted, found
from kvd.wire.endpoints import host_and_port
from kvd.wire.hosts import bracketed
from kvd.wire.stream_link import Quiet

# Time for which a restart is a finding; rolling restarts of a fleet take some minutes.
RECENT_S = 600.0

# Errors of connections that were made but never completed a ZeroMQ handshake.
NO_HANDSHAKE = ("handshake", "protocol error", "connection lost")
CURVE_FAULTS = ("CURVE", "authentication failed")
TOO_LARGE = "message too large"  # the error of a connection that such a message has ended
PUBLISHING = ("PUB", "XPUB")
SHOWN_BYTES = 24  # shown of an answer that is not ZeroMQ's


def check_engine(stream: StreamEvidence) -> Iterator[Finding]:
    """Yields what is wrong with the connection, or with its other end."""
    if stream.is_paused:
        return
    fault = _contact(stream)
    if fault is not None:
        yield fault
    elif stream.too_large and (stream.loss or not stream.messages):
        large = counted(stream.too_large, "message")
        evidence = f"{large} of more than engine_message_bytes, each of which ended the connection"
        yield found("message_too_large", stream.subject, evidence)
    elif stream.bad_frames and not stream.messages:
        refused = ", ".join(f"{why} {count}" for why, count in stream.bad_frames.items())
        heard = counted(sum(stream.bad_frames.values()), "message")
        evidence = f"{heard}, none a batch of events: {refused}"
        yield found("not_kv_events", stream.subject, evidence, endpoint=stream.endpoint)
    elif stream.messages and stream.batches_flawed >= stream.messages:
        evidence = f"none of {stream.messages} batches could be read: {stream.flaw}"
        yield found("not_kv_events", stream.subject, evidence, endpoint=stream.endpoint)
    elif stream.quiet == Quiet.SILENT:
        evidence = f"connected to {stream.endpoint}, 0 messages for {stream.quiet_s:.0f} s or more"
        yield found("engine_silent", stream.subject, evidence)


def check_restart(stream: StreamEvidence) -> Iterator[Finding]:
    """Yields that the engine was started again a short while ago."""
    if stream.restarted_s is not None and stream.restarted_s < RECENT_S:
        times = "once" if stream.restarts == 1 else f"{stream.restarts} times"
        evidence = f"restarted {times}, the last time {stream.restarted_s:.0f} s ago"
        yield found("engine_restarted", stream.subject, evidence)


def _contact(stream: StreamEvidence) -> Finding | None:
    """Returns why there is no usable connection; None if there is one, or none yet."""
    # Being connected is not enough: libzmq briefly takes an HTTP server for a peer of ZMTP 1.0.
    if stream.is_connected and (stream.messages or stream.probe is None or stream.probe.is_zmtp):
        return None
    error = stream.last_error
    if TOO_LARGE in error:
        return None  # the connection is made again in a moment
    if any(each in error for each in CURVE_FAULTS):
        return found("keys_differ", stream.subject, error)
    if stream.probe is not None:
        return _seen(stream, stream.probe)
    if (fault := _handshake(stream)) is not None:
        return fault
    if error or stream.quiet == Quiet.UNREACHABLE:
        return _unreachable(stream, error or f"no connection for {stream.quiet_s:.0f} s")
    return None  # the first connection is under way


def _handshake(stream: StreamEvidence) -> Finding | None:
    """Returns the finding that a listener never completed a ZeroMQ handshake, else None."""
    error = stream.last_error
    if stream.joins or not any(each in error for each in NO_HANDSHAKE):
        return None
    return _not_zmq(stream, f"no handshake of ZeroMQ's: {error}")


def _seen(stream: StreamEvidence, probe: ProbeResult) -> Finding | None:
    where = stream.endpoint
    if probe.fault:
        return _unreachable(stream, f"{where}: {probe.fault}")
    if stream.joins and not probe.is_zmtp and not probe.received:
        return _unreachable(stream, f"{where} accepts connections and says nothing: it hangs")
    if not probe.is_zmtp:
        answer = f"began with {_shown(probe.received)}" if probe.received else "said nothing"
        return _not_zmq(
            stream, f"{where} accepts connections and {answer}: no greeting of ZeroMQ's"
        )
    if probe.socket_type and probe.socket_type not in PUBLISHING:
        evidence = f"{where} speaks ZeroMQ, but as a {probe.socket_type} socket, not PUB"
        return found("not_kv_events", stream.subject, evidence, endpoint=where)
    if probe.mechanism and (probe.mechanism == "CURVE") != stream.has_key:
        own = "CURVE" if stream.has_key else "NULL"
        evidence = f"{where} wants {probe.mechanism}, and is registered for {own}"
        return found("keys_differ", stream.subject, evidence)
    # An engine that greets but never completes the handshake is a fault; any other is connecting.
    return _handshake(stream)


def _unreachable(stream: StreamEvidence, evidence: str) -> Finding:
    host_port = host_and_port(stream.endpoint)
    bind = stream.endpoint if host_port is None else f"tcp://*:{host_port[1]}"
    fields = {"endpoint": stream.endpoint, "bind": bind}
    return found("engine_unreachable", stream.subject, evidence, **fields)


def _not_zmq(stream: StreamEvidence, evidence: str) -> Finding:
    host = host_of(stream.endpoint)
    return found("not_zmq", stream.subject, evidence, endpoint=stream.endpoint, host=host)


def host_of(endpoint: str) -> str:
    """Returns the host of an address, for a line to paste; an IPv6 address has brackets."""
    host_port = host_and_port(endpoint)
    return "HOST" if host_port is None else bracketed(host_port[0])


def _shown(received: bytes) -> str:
    return repr(received[:SHOWN_BYTES].decode("ascii", "backslashreplace"))
