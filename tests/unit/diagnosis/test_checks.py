"""Checks from evidence to findings: what counts as a fault, and how several are reported."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kvd.diagnosis.chain import MOST_OF_A_KIND, diagnose
from kvd.diagnosis.choices import AWAY_S, ENOUGH_BOOKINGS, SKEW_S
from kvd.diagnosis.engines import RECENT_S
from kvd.diagnosis.evidence import (
    CapacityEvidence,
    Evidence,
    FaceEvidence,
    KvdEvidence,
    ModelEvidence,
    ProbeResult,
    ReplicaEvidence,
    ReplicaTraffic,
    SaltUsage,
    SelectionEvidence,
    SharedEvidence,
    ShareEvidence,
    StreamEvidence,
    UpstreamEvidence,
    WorkerEvidence,
)
from kvd.diagnosis.findings import KINDS, Finding, Severity, found
from kvd.diagnosis.questions import ENOUGH
from kvd.model import PartitionKey
from kvd.wire.endpoints import check_replay_endpoint

M = PartitionKey("m", "default")
STREAM = StreamEvidence(
    subject="worker 1 rank 0 of m/default",
    key=M,
    endpoint="tcp://gpu1:5557",
    replay_endpoint="tcp://gpu1:5558",
    has_key=False,
    block_size=16,
    messages=10,
    joins=1,
)
AWAY = replace(STREAM, is_connected=False, messages=0, joins=0)
LOST = replace(STREAM, gaps=1, lost=5, loss="missing 3..7")
SIDE = SaltUsage(100, 0, 0, 100, frozenset({1}))
MODEL = ModelEvidence(M, 16, 1000, 0, 100, 50, False, SIDE, SIDE, {})


def names(evidence: Evidence) -> list[str]:
    return [each.name for each in diagnose(evidence)]


def of_stream(stream: StreamEvidence) -> list[str]:
    return names(Evidence(streams=(stream,)))


def of_model(model: ModelEvidence) -> list[str]:
    return names(Evidence(models=(model,)))


def test_nothing_is_wrong_with_nothing() -> None:
    assert diagnose(Evidence()) == []
    assert of_stream(STREAM) == of_model(MODEL) == []


CASES = [
    (name, case)
    for name, kind in KINDS.items()
    for case in ([""] if isinstance(kind.remedy, str) else kind.remedy)
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_every_kind_is_worded(name: str, case: str) -> None:
    names = ("endpoint", "bind", "host", "hint", "size", "known", "ranks", "blocks")
    fields = dict.fromkeys(names, "<filled in>")
    finding = found(name, "a subject", "1 of 2", case, **fields, expiry_s=300.0)
    assert finding.severity in Severity and finding.severity is KINDS[name].severity
    assert finding.remedy
    assert KINDS[name].means[0].islower() and not KINDS[name].means.endswith(".")


def test_findings_come_in_the_order_of_the_chain() -> None:
    evidence = Evidence(
        streams=(LOST, replace(AWAY, last_error="Connection refused")),
        capacity=CapacityEvidence(8, 8, 8, 4, 4),
        clock_lead_s=SKEW_S,
    )
    assert names(evidence) == [
        "engine_unreachable",
        "messages_lost",
        "index_full",
        "clock_skew",
    ]


def test_a_fleet_that_is_away_as_a_whole_is_summed_up() -> None:
    streams = [
        replace(AWAY, subject=f"worker {number}", last_error="refused") for number in range(90)
    ]
    findings = diagnose(Evidence(streams=tuple(streams)))
    assert len(findings) == MOST_OF_A_KIND + 1
    assert findings[-1].subject == "26 more" and findings[-1].evidence == "90 in all"


@pytest.mark.parametrize(
    ("host", "shown"), [("[::1]", "[::1]"), ("kvd.example", "kvd.example"), ("$(reboot)", "HOST")]
)
def test_a_line_to_paste_has_no_name_that_a_shell_would_run(host: str, shown: str) -> None:
    (finding,) = diagnose(Evidence(faces=(FaceEvidence("indexer", 1, host),)))
    assert finding.remedy.endswith(f"--allowed-hosts {shown}") and repr(host) in finding.evidence


# ---- engines


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (AWAY, []),  # the connection is just being made
        (replace(AWAY, is_paused=True, last_error="paused"), []),
        (replace(AWAY, quiet="unreachable", quiet_s=31.0), ["engine_unreachable"]),
        (replace(AWAY, last_error="cannot connect: refused"), ["engine_unreachable"]),
        (replace(AWAY, last_error="handshake failed: tcp://x"), ["not_zmq"]),
        (replace(AWAY, last_error="connection lost: tcp://x"), ["not_zmq"]),
        (replace(AWAY, last_error="connection lost", joins=1), ["engine_unreachable"]),
        (replace(AWAY, last_error="authentication failed in the handshake"), ["keys_differ"]),
        (replace(AWAY, probe=ProbeResult(is_zmtp=True, mechanism="NULL", socket_type="PUB")), []),
        (replace(AWAY, probe=ProbeResult(is_zmtp=True, mechanism="NULL", socket_type="XPUB")), []),
        (
            replace(AWAY, probe=ProbeResult(is_zmtp=True, mechanism="NULL", socket_type="DEALER")),
            ["not_kv_events"],
        ),
        (replace(AWAY, probe=ProbeResult(is_zmtp=True, mechanism="CURVE")), ["keys_differ"]),
        (replace(AWAY, probe=ProbeResult(is_zmtp=True, mechanism="CURVE"), has_key=True), []),
        (replace(AWAY, probe=ProbeResult(is_zmtp=True), has_key=True), []),  # hung up early
        (
            replace(
                AWAY,
                last_error="protocol error in the handshake",
                probe=ProbeResult(is_zmtp=True, mechanism="NULL"),
            ),
            ["not_zmq"],  # it sends a greeting and nothing after it
        ),
        (
            replace(AWAY, last_error="handshake failed", probe=ProbeResult(is_zmtp=True)),
            ["not_zmq"],  # it sends a part of a greeting
        ),
        (replace(AWAY, probe=ProbeResult()), ["not_zmq"]),
        (replace(AWAY, joins=1, probe=ProbeResult()), ["engine_unreachable"]),  # the engine hangs
        (replace(STREAM, messages=0, quiet="silent", quiet_s=30.0), ["engine_silent"]),
        (replace(STREAM, bad_frames={"frame_count": 3}), []),  # other messages are batches
        (replace(STREAM, messages=0, bad_frames={"frame_count": 3}), ["not_kv_events"]),
        (replace(STREAM, messages=0, bad_frames={"too_large": 1}), ["message_too_large"]),
        (replace(STREAM, bad_frames={"too_large": 1}), []),  # the engine has restarted since
        (replace(STREAM, is_connected=False, last_error="message too large: tcp://x"), []),
        (replace(STREAM, restarts=2, restarted_s=1.0), ["engine_restarted"]),
        (replace(STREAM, restarts=2, restarted_s=RECENT_S), []),
        (
            replace(STREAM, is_degraded=True, loss="unknown", restarts=1, restarted_s=1.0),
            ["engine_restarted", "stream_degraded"],
        ),
    ],
)
def test_an_engine(stream: StreamEvidence, expected: list[str]) -> None:
    assert of_stream(stream) == expected


def test_what_an_http_server_says_is_taken_for_a_peer_for_a_moment() -> None:
    stream = replace(STREAM, messages=0, bad_frames={"frame_count": 1})
    assert of_stream(replace(stream, probe=ProbeResult(received=b"HTTP/1.1 400 Bad Request"))) == [
        "not_zmq"
    ]


# ---- events


@pytest.mark.parametrize(
    ("stream", "expected"),
    [
        (replace(LOST, replay_endpoint=None), ["messages_lost", "replay_missing"]),
        (replace(LOST, replays={"silent": 1}), ["messages_lost", "replay_missing"]),
        (replace(LOST, replays={"failed": 1}), ["messages_lost", "replay_missing"]),
        (replace(LOST, replays={"marker": 1}), ["messages_lost", "replay_too_short"]),
        (replace(LOST, replays={"late": 1}), ["messages_lost"]),
        (replace(LOST, dropped=5, replays={"marker": 1}), ["queue_full", "replay_too_short"]),
        (replace(LOST, dropped=2), ["messages_lost", "queue_full"]),
        (replace(STREAM, crashes=1, loss="an internal error"), ["internal_error"]),
        (replace(STREAM, crashes=1), []),  # the engine has cleared its cache since
        (
            replace(LOST, lost=1, crashes=1, replays={"marker": 1}),
            ["internal_error", "replay_too_short"],
        ),
        (replace(STREAM, is_degraded=True, loss="registered again"), ["stream_degraded"]),
        (replace(LOST, is_degraded=True, replays={"late": 1}), ["messages_lost"]),
        (
            replace(LOST, bad_frames={"too_large": 5}, replays={"marker": 1}),
            ["message_too_large", "replay_too_short"],
        ),
        (
            replace(LOST, bad_frames={"too_large": 1}, replays={"late": 1}),
            ["message_too_large", "messages_lost"],
        ),
        (replace(LOST, loss=""), []),  # the engine has cleared its cache since
        (replace(STREAM, replay_probe=ProbeResult("Connection refused")), ["replay_missing"]),
        (replace(STREAM, replay_probe=ProbeResult(received=b"HTTP")), ["replay_missing"]),
        (replace(STREAM, replay_probe=ProbeResult(is_zmtp=True, socket_type="ROUTER")), []),
        (replace(STREAM, replay_probe=ProbeResult(is_zmtp=True, mechanism="CURVE")), []),
        (replace(STREAM, ignored={"medium": 1}), []),  # other events are used
        (replace(STREAM, ignored={"block_size": 1}), ["block_size_mismatch"]),
        (replace(STREAM, ignored={"tokens": 1}), ["tokens_missing"]),
        (replace(STREAM, batches_flawed=1), []),  # the engine has cleared its cache since
        (
            replace(STREAM, batches_flawed=1, loss="batch 3 could not be decoded"),
            ["batches_unreadable"],
        ),
    ],
)
def test_events(stream: StreamEvidence, expected: list[str]) -> None:
    assert of_stream(stream) == expected


def test_an_endpoint_to_paste_is_valid() -> None:
    at_ipv6 = replace(LOST, endpoint="tcp://[fd00::5]:5557", replay_endpoint=None)
    remedies = [each.remedy for each in diagnose(Evidence(streams=(at_ipv6,)))]
    (endpoint,) = re.findall(r'register "replay_endpoint": "(.*?)"', " ".join(remedies))
    check_replay_endpoint(endpoint)
    assert endpoint == "tcp://[fd00::5]:5657"


# ---- the gateway


def test_the_gateway() -> None:
    upstream = UpstreamEvidence("http://gpu1:8000", "", "")
    kvd = KvdEvidence("http://kv:8092", "")
    assert names(Evidence(upstreams=(upstream,), kvds=(kvd,))) == []
    away = replace(upstream, problem="unreachable", doubt="other tokens")
    (finding,) = diagnose(Evidence(upstreams=(away,)))
    assert finding.name == "upstream_unusable"
    assert finding.remedy.startswith("start the engine at http://gpu1:8000")
    named = replace(away, url="dns:vllm-headless:8000")
    (finding,) = diagnose(Evidence(upstreams=(named,)))
    assert finding.remedy.startswith("have the name in dns:vllm-headless:8000")
    assert names(Evidence(upstreams=(replace(upstream, doubt="other"),))) == ["tokens_disagree"]
    assert names(Evidence(kvds=(replace(kvd, problem="unreachable"),))) == ["kvd_unreachable"]
    face = FaceEvidence("gateway", 0, "")
    assert names(Evidence(faces=(face,))) == ["upstreams_missing"]
    assert names(Evidence(faces=(face,), upstreams=(upstream,))) == []


# ---- identity


def test_a_model_is_to_be_registered_where_none_is() -> None:
    (finding,) = diagnose(Evidence(unknown={M: 2}))
    assert finding.evidence == "2 requests for a model that nobody registered; registered: none"
    assert finding.remedy.startswith("register the workers of m:")


def test_who_was_registered_since_is_not_unknown() -> None:
    other = PartitionKey("n", "default")
    evidence = Evidence(registered=frozenset({M}), unknown={M: 3, other: 1})
    (finding,) = diagnose(evidence)
    assert (finding.name, finding.subject) == ("model_name_mismatch", "model n/default")
    assert names(replace(evidence, registered=frozenset({M, other}))) == []


def test_names_that_are_many_are_counted() -> None:
    registered = frozenset(PartitionKey(f"m{number}", "default") for number in range(7))
    (finding,) = diagnose(Evidence(registered=registered, unknown={M: 1}))
    assert finding.evidence.endswith("registered: m0, m1, m2, m3, and 3 more")


def test_ranks_need_not_begin_with_0() -> None:
    (finding,) = diagnose(Evidence(models=(replace(MODEL, ranks={1: frozenset({8, 9, 11})}),)))
    assert finding.evidence == "ranks 8, 9, 11 are registered, 10 are not"


def test_a_rank_may_have_any_number() -> None:
    ranks = {1: frozenset({0, 2, 2**32 - 1})}
    (finding,) = diagnose(Evidence(models=(replace(MODEL, ranks=ranks),)))
    assert finding.evidence == (
        "ranks 0, 2, 4294967295 are registered, 1, 3, 4, 5, and 4294967289 more are not"
    )
    assert finding.remedy.endswith(": dp_rank 1, 3, 4, 5, and 4294967289 more")


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("is_eagle differs from that of its model", "worker_unschedulable"),
        ("block_size 64 differs from 16 of its model", "block_size_mismatch"),
        ("kv_events endpoint is required for dp_rank 1", "rank_missing"),
    ],
)
def test_a_worker_that_cannot_be_chosen(reason: str, expected: str) -> None:
    assert names(Evidence(workers=(WorkerEvidence(1, M, (reason,)),))) == [expected]


# ---- questions


@pytest.mark.parametrize(
    ("asked", "announced", "expected"),
    [
        (
            SaltUsage(ENOUGH),
            SaltUsage(ENOUGH, salted=ENOUGH, announcing_salts=ENOUGH),
            ["salt_one_sided"],
        ),
        (SaltUsage(ENOUGH - 1), SaltUsage(ENOUGH, salted=ENOUGH), []),  # too few to say so
        (SaltUsage(ENOUGH, salted=1), SaltUsage(ENOUGH, salted=ENOUGH), []),
        (
            SaltUsage(ENOUGH, salted=ENOUGH),
            SaltUsage(ENOUGH, announcing_salts=ENOUGH),
            ["salt_one_sided"],
        ),
        (
            SaltUsage(ENOUGH, salted=ENOUGH),
            SaltUsage(ENOUGH),
            [],
        ),  # these engines do not announce salts
        (SaltUsage(ENOUGH, adapted=ENOUGH), SaltUsage(ENOUGH), ["adapter_one_sided"]),
        (SaltUsage(ENOUGH), SaltUsage(ENOUGH, adapted=ENOUGH), ["adapter_one_sided"]),
        (SaltUsage(ENOUGH, adapted=1), SaltUsage(ENOUGH, adapted=1), []),
        (
            SaltUsage(0),
            SaltUsage(ENOUGH, salted=ENOUGH, adapted=ENOUGH),
            [],
        ),  # all questions were by hash
    ],
)
def test_sides(asked: SaltUsage, announced: SaltUsage, expected: list[str]) -> None:
    assert of_model(replace(MODEL, asked=asked, announced=announced)) == expected


def test_what_never_matches_is_told_by_its_first_cause() -> None:
    never = replace(MODEL, matched=0, is_unmatched=True)
    assert of_model(never) == ["no_match_ever"]
    other = replace(SIDE, first_tokens=frozenset({2}))
    assert of_model(replace(never, announced=other)) == ["tokens_disagree"]
    assert of_model(replace(never, announced=replace(other, salted=100))) == ["salt_one_sided"]
    assert of_model(replace(never, announced=SaltUsage())) == ["no_match_ever"]


# ---- choices


def test_shares() -> None:
    share = ShareEvidence(M, {1: ENOUGH_BOOKINGS, 2: 1}, workers=2)
    assert names(Evidence(shares=(share,))) == ["load_one_sided"]
    for other in (
        replace(share, bookings={1: ENOUGH_BOOKINGS - 1}),
        replace(share, bookings={1: ENOUGH_BOOKINGS, 2: 50}),
        replace(share, workers=1),
    ):
        assert names(Evidence(shares=(other,))) == []


def test_selections() -> None:
    assert names(Evidence(selections=SelectionEvidence(overloaded=1))) == ["all_overloaded"]
    assert names(Evidence(selections=SelectionEvidence(queue_full=1))) == ["queue_full"]
    assert names(Evidence(selections=SelectionEvidence(served=9, waiting=2))) == []


def test_room() -> None:
    assert names(Evidence(capacity=CapacityEvidence(8, 8, 8, refused=4))) == []  # long ago
    (finding,) = diagnose(Evidence(capacity=CapacityEvidence(0, 8, 8, 4, 4)))
    assert finding.remedy.startswith("see docs/faces/conductor.md")


def test_replicas() -> None:
    away = ReplicaEvidence("tcp://b:1", AWAY_S + 1, "")
    shared = SharedEvidence("redis://a", True, 0, "")
    for evidence in (
        Evidence(replicas=(away,)),
        Evidence(replicas=(replace(away, away_s=0.0, probe=ProbeResult("refused")),)),
        Evidence(traffic=ReplicaTraffic(overflows=1)),
        Evidence(traffic=ReplicaTraffic(missed=1)),
        Evidence(shared=replace(shared, is_connected=False, fault="refused")),
        Evidence(shared=replace(shared, behind=1)),
    ):
        assert names(evidence) == ["replica_behind"]
    well = replace(away, away_s=AWAY_S)
    assert names(Evidence(replicas=(well,), shared=shared, clock_lead_s=0.5)) == []


def test_a_finding_is_what_json_shows() -> None:
    finding = found("clock_skew", "replicas", "1 s")
    assert Finding(**finding._asdict()) == finding
    assert list(finding._asdict()) == ["name", "severity", "subject", "evidence", "remedy"]


def test_files_that_cannot_be_written() -> None:
    (finding,) = diagnose(Evidence(watched_s=60.0, unwritten={"decision log": 1}))
    assert (finding.name, finding.subject) == ("files_not_written", "decision log")
    assert finding.evidence.startswith("1 write failed in ")
