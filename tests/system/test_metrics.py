"""/metrics: exactly the documented families beside kvd's own, and no stalls at many series."""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import httpx
import msgpack
import pytest

import kvd.index.partitions
import kvd.index.registry
from kvd.errors import Unavailable
from kvd.faces.indexer import routes as indexer
from kvd.index.metrics import listener_families, state_families
from kvd.index.partitions import State
from kvd.index.peers import MAX_PEERS
from kvd.index.registry import Registry
from kvd.model import PartitionKey, RankKey
from kvd.telemetry.metrics import (
    BREATH,
    BUCKETS,
    Family,
    RequestMetrics,
    by_label,
    counter,
    render,
    stats_families,
)
from kvd.wire.event_stream import EventStream
from kvd.wire.replay import ReplayEnd
from kvd.wire.stream_stats import StreamStats
from kvd_core.zmq.drain import BAD_FRAME_COUNT, BAD_NUMBER, BAD_SEQUENCE, TOO_LARGE
from tests.support import http_client
from tests.support.batch_sinks import NoStream
from tests.support.exposition import parse
from tests.support.http_client import Client
from tests.support.idle_listeners import IdleListeners
from tests.support.processes import Server
from tests.support.running import running


def text_of(families: Iterator[Family | None]) -> str:
    return b"".join(render(families)).decode()


def test_requests_are_counted_as_on_the_original() -> None:
    requests = RequestMetrics("dynamo_kvindexer")
    for status, seconds in ((200, 0.0001), (404, 0.0002), (503, 100.0)):
        requests.counts.observe("/query", "POST", status, seconds)
    requests.counts.observe("/workers", "GET", 200, 0.00015)
    requests.counts.observe("/metrics", "GET", 200, 1)
    samples = parse(text_of(requests.families()))
    duration = "dynamo_kvindexer_request_duration_seconds"
    assert samples['dynamo_kvindexer_requests_total{endpoint="/query",method="POST"}'] == 3
    assert samples['dynamo_kvindexer_errors_total{endpoint="/query",status_class="4xx"}'] == 1
    assert samples['dynamo_kvindexer_errors_total{endpoint="/query",status_class="5xx"}'] == 1
    query = [f'{duration}_bucket{{endpoint="/query",le="{le}"}}' for le in ("0.0001", "0.0002")]
    assert [samples[key] for key in query] == [1, 2]
    assert samples[f'{duration}_bucket{{endpoint="/query",le="52.4288"}}'] == 2
    assert samples[f'{duration}_bucket{{endpoint="/query",le="+Inf"}}'] == 3
    assert samples[f'{duration}_count{{endpoint="/query"}}'] == 3
    assert samples[f'{duration}_sum{{endpoint="/workers"}}'] == 0.00015
    assert len(BUCKETS) == 20
    assert not any("/metrics" in key for key in samples)
    assert sum(key.startswith(f"{duration}_bucket") for key in samples) == 2 * 21


def test_nothing_is_announced_before_it_is_hit() -> None:
    assert text_of(RequestMetrics("dynamo_kvindexer").families()) == ""


def test_totals_outlive_their_listeners() -> None:
    def listener() -> EventStream:
        made = EventStream("x", "tcp://h:1", NoStream())
        made.take(3, b"12345")
        made.catch_up.judge()
        made.catch_up.apply_held()
        made.refuse("frames")
        return made

    left = StreamStats()
    left.add(listener().stats)
    samples = parse(text_of(listener_families([listener()], left, now=0.0)))
    assert samples["kvd_listener_messages_total"] == 2
    assert samples["kvd_listener_payload_bytes_total"] == 10
    assert samples["kvd_listener_lost_total"] == 6
    assert samples['kvd_bad_messages_total{reason="frames"}'] == 2
    statuses = ("active", "failed", "paused", "pending")
    by_status = [samples[f'dynamo_kvindexer_listeners{{status="{s}"}}'] for s in statuses]
    assert by_status == [0, 0, 0, 1]


def test_every_reason_has_its_series_from_the_start() -> None:
    samples = parse(text_of(listener_families([], StreamStats(), now=0.0)))
    for end in ReplayEnd:
        assert samples[f'kvd_replays_total{{end="{end}"}}'] == 0
    for reason in (BAD_FRAME_COUNT, BAD_SEQUENCE, BAD_NUMBER, TOO_LARGE):
        assert samples[f'kvd_bad_messages_total{{reason="{reason}"}}'] == 0


def test_totals_outlive_their_partitions() -> None:
    state = State()
    key = RankKey(PartitionKey("m", "a"), 1, 0)
    for size in (16, 8):
        state.add_rank(key, size)
        worker = state.partition("m", "a").workers[1]
        worker.store(0, [1], [1])
        worker.store(0, [1], [2])
        worker.drop(0, [7])
        state.remove_rank(key)
    samples = parse(text_of(state_families(state, 0)))
    assert samples["kvd_unknown_blocks_removed_total"] == 2
    assert samples["kvd_rebound_blocks_total"] == 2
    assert samples["kvd_partitions_replaced_total"] == 0


def test_what_reached_a_bound_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvd.index.partitions, "MAX_DEPARTED", 1)
    state = State(max_blocks=1, max_partitions=1)
    state.add_rank(RankKey(PartitionKey("m", "a"), 1, 0), 16)
    with pytest.raises(Unavailable):
        state.add_rank(RankKey(PartitionKey("m", "b"), 1, 0), 16)
    state.begin_recovery()
    for instance_id in range(3):
        state.note_departure("m", "a", instance_id, None)
    samples = parse(text_of(state_families(state, 1)))
    assert samples["kvd_departures_unnoted_total"] == 2
    assert samples["kvd_partitions_refused_total"] == 1
    assert samples["kvd_index_max_blocks"] == 1


def test_parked_blocks_that_lacked_their_salt_are_counted() -> None:
    """Engines send a salt with a prompt's first block, which comes late here."""
    state = State()
    stream = state.add_rank(RankKey(PartitionKey("m", "a"), 1, 0), 4)

    def stored(name: int, parent: int | None, **more: object) -> bytes:
        event = {
            "type": "BlockStored",
            "block_hashes": [name],
            "parent_block_hash": parent,
            "token_ids": [name] * 4,
            "block_size": 4,
            **more,
        }
        return bytes(msgpack.packb([1.5, [event], None]))

    stream.apply(stored(2, 1))
    samples = parse(text_of(state_families(state, 1)))
    assert samples["kvd_parked_blocks"] == 1
    assert samples["kvd_parked_blocks_unsalted_total"] == 0
    stream.apply(stored(1, None, extra_keys=[["salt"]]))
    samples = parse(text_of(state_families(state, 1)))
    assert samples["kvd_parked_blocks"] == 0
    assert samples["kvd_parked_blocks_unsalted_total"] == 1


async def test_forgotten_places_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvd.index.registry, "MAX_LEFT_POSITIONS", 2)
    state = State()
    registry = Registry(state, IdleListeners())
    for instance_id in range(5):
        key = RankKey(PartitionKey("m", "a"), instance_id, 0)
        registry.register(key, "tcp://127.0.0.1:1", 16, None)
        await registry.unregister(instance_id, "m", "a", None)
    samples = parse(text_of(indexer.families(state, registry, indexer.dumps_bound(8))))
    assert samples["kvd_places_forgotten_total"] == 3


def test_the_index_is_summed_over_its_partitions() -> None:
    state = State()
    for tenant in ("a", "b"):
        state.add_rank(RankKey(PartitionKey("m", tenant), 1, 0), 16)
        state.partition("m", tenant).workers[1].store(0, [1, 2], [1, 2])
    state.partition("m", "a").index.add_worker(2)
    none = parse(text_of(state_families(State(), 0)))
    assert none['kvd_blocks{tier="device"}'] == none['kvd_blocks{tier="external"}'] == 0
    samples = parse(text_of(state_families(state, 2)))
    assert samples["dynamo_kvindexer_models"] == 2
    assert samples["dynamo_kvindexer_workers"] == 2
    assert samples['kvd_blocks{tier="device"}'] == 4
    assert samples["kvd_index_blocks"] == 4
    assert samples['kvd_events_total{type="stored"}'] == 0
    assert samples['kvd_bad_events_total{reason="truncated"}'] == 0


def test_thousands_of_series_come_in_pieces_with_rests_between() -> None:
    state = State()
    for number in range(1500):
        state.add_rank(RankKey(PartitionKey("m", str(number)), 1, 0), 16)
    listeners = [EventStream("x", "tcp://h:1", NoStream()) for _ in range(5000)]

    def families() -> Iterator[Family | None]:
        yield from listener_families(listeners, StreamStats(), now=0.0)
        yield from state_families(state, 5000)
        for number in range(50):
            values = {str(reason): reason for reason in range(100)}
            yield by_label(f"kvd_{number}", "gauge", "Many", "reason", values)

    pieces = list(render(families()))
    lines = [piece.count(b"\n") for piece in pieces]
    assert sum(lines) > 5000
    assert max(lines) <= BREATH + 2  # a family begins with two lines of help
    assert lines.count(0) >= 5000 // BREATH  # rests while listeners and partitions are read


def test_many_short_families_come_in_pieces_with_rests_between() -> None:
    pieces = list(render(counter(f"kvd_{number}_total", "One", 1) for number in range(200)))
    lines = [piece.count(b"\n") for piece in pieces]
    assert sum(lines) == 600
    assert max(lines) <= BREATH + 2
    assert lines.count(0) >= 600 // (BREATH + 2)
    assert all(not (one and other) for one, other in pairwise(lines))  # a rest after each piece


def test_helpers_make_whole_families() -> None:
    assert text_of(iter([counter("a_total", "A", 3), None])) == (
        "# HELP a_total A\n# TYPE a_total counter\na_total 3\n"
    )
    from kvd.http.limits import STATS_HELP, HttpStats

    gauges = frozenset({"connections_open"})
    stats = stats_families("kvd_http", HttpStats(requests=5), STATS_HELP, gauges)
    samples = parse(text_of(stats))
    assert samples["kvd_http_requests_total"] == 5
    assert samples["kvd_http_connections_open"] == 0
    assert samples["kvd_http_connections_total"] == 0


def test_every_number_of_the_http_server_has_a_help_of_its_own() -> None:
    from kvd.http.limits import STATS_HELP, HttpStats

    assert [each.name for each in fields(HttpStats)] == list(STATS_HELP)
    assert len(set(STATS_HELP.values())) == len(STATS_HELP)


def scrape(server: Server) -> tuple[httpx.Response, dict[str, float]]:
    answer = http_client.get(f"{server.base_url}/metrics")
    return answer, parse(answer.text)


def hit(server: Server) -> None:
    """Sends requests whose counts are the same on any indexer."""
    with Client(server.base_url) as client:
        client.post("/query", json={"token_ids": [1], "model_name": "x"})
        client.get("/query")
        client.get("/workers")
        client.head("/workers")
        client.get("/nope")
        client.post("/register_peer", json={"url": "http://x"})
        client.post("/register_peer", content=b"{}")


DOCUMENTED = re.compile(
    r"dynamo_kvindexer_(errors_total|listeners|models|workers|requests_total|.*_bucket|.*_count)"
)


def counts(samples: dict[str, float]) -> dict[str, float]:
    """Returns samples of documented families that depend neither on time nor on health checks."""
    return {
        key: value
        for key, value in samples.items()
        if DOCUMENTED.match(key)
        and "/health" not in key
        and ("_bucket" not in key or 'le="+Inf"' in key)
    }


def test_a_running_kvd_says_what_it_counts(kvd_process: Callable[..., Server]) -> None:
    server = kvd_process()
    hit(server)
    answer, samples = scrape(server)
    assert answer.headers["content-type"] == "text/plain; version=0.0.4"
    assert samples['dynamo_kvindexer_requests_total{endpoint="/query",method="GET"}'] == 1
    assert samples['dynamo_kvindexer_requests_total{endpoint="/workers",method="HEAD"}'] == 1
    assert (
        samples['dynamo_kvindexer_errors_total{endpoint="/register_peer",status_class="4xx"}'] == 1
    )
    assert samples["kvd_http_connections_open"] >= 1
    assert samples['kvd_recovery_attempts_total{outcome="recovered"}'] == 0
    assert samples["process_resident_memory_bytes"] > 1e6
    assert not any(name.startswith("kvd_https_") for name in samples)


def test_peers_at_the_bound_and_the_https_port_are_counted(
    tmp_path: Path, certificate: Path, free_port: Callable[[], int]
) -> None:
    port, https = free_port(), f"127.0.0.1:{free_port()}"
    environ = {
        "KVD_PEERS": ",".join(f"http://p{number}" for number in range(MAX_PEERS - 1)),
        "KVD_RECOVERY_DELAY_S": "60",
        "DYN_ROUTER_MIN_INITIAL_WORKERS": "1",  # so that none of the peers is looked up
        "KVD_INDEXER_BIND": f"127.0.0.1:{port},tls:{https}",
        "KVD_TLS_CERTFILE": str(certificate / "cert.pem"),
        "KVD_TLS_KEYFILE": str(certificate / "key.pem"),
    }
    trust = ssl.create_default_context(cafile=certificate / "cert.pem")
    with (
        running(tmp_path, port, "indexer", environ=environ) as server,
        httpx.Client(verify=trust, trust_env=False) as client,
    ):
        for name, status in (("a", 201), ("b", 503), ("a", 201), ("c", 503)):
            url = f"https://{https}/register_peer"
            assert client.post(url, json={"url": f"http://{name}"}).status_code == status
        samples = scrape(server)[1]
    assert samples["kvd_peers_refused_total"] == 2
    assert samples["kvd_https_requests_total"] == 4
    assert samples["kvd_https_connections_total"] == samples["kvd_https_connections_open"] == 1
    plain = {name for name in samples if name.startswith("kvd_http_")}
    plain = {name for name in plain if not name.startswith("kvd_http_refusals_")}
    assert {name.replace("http", "https") for name in plain} <= samples.keys()


@pytest.mark.peer
def test_the_live_peer_counts_the_same(
    kvd_process: Callable[..., Server], peer_process: Callable[..., Server]
) -> None:
    servers = kvd_process(), peer_process()
    for server in servers:
        hit(server)
    ours, theirs = (counts(scrape(server)[1]) for server in servers)
    assert ours == theirs
