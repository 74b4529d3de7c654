"""One index behind all faces: events of one face show in the answers of the others."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgpack
import pytest
import trio

from kvd.errors import Conflict, NotFound
from kvd.faces.conductor import routes as conductor
from kvd.http.messages import Request, Response
from kvd.index.partitions import State, number_of
from kvd.index.publishers import Publishers
from kvd.index.registry import INDEXER, Registry
from kvd.model import PartitionKey, RankKey
from kvd.wire.envelope import StreamIdentity
from kvd.wire.standard_events import StandardEventStream
from kvd_core.base.hashing import local_hashes
from kvd_core.conductor.conductor import Source
from kvd_core.index.prefix_index import UNFINISHED
from kvd_core.json.scan import BodyScanner
from tests.models.conductor_model import sequence_hashes

BLOCK_SIZE = 4
TOKENS = list(range(16))
LOCALS = local_hashes(TOKENS, BLOCK_SIZE)
SEQUENCES = sequence_hashes(TOKENS, BLOCK_SIZE, 1337)
KEY = PartitionKey("m", "default")
STORED = ["BlockStored", [1, 2, 3], None, TOKENS[:12], BLOCK_SIZE, None, "GPU"]


def batch(*events: object, rank: int | None = None) -> bytes:
    payload: bytes = msgpack.packb([0.5, list(events), rank])
    return payload


class Fleet:
    def __init__(self) -> None:
        self.state = State()

    def publisher(
        self, instance: str = "7", *, store: bool = False, rank: int = 0, size: int = BLOCK_SIZE
    ) -> tuple[Source, StandardEventStream]:
        source = self.state.add_source(KEY, size, instance, "", "", rank, store=store)
        return source, StandardEventStream(
            source, StreamIdentity("m", "default", size, "", "", rank, store)
        )

    def leave(self, source: Source, size: int = BLOCK_SIZE) -> None:
        self.state.remove_source(KEY, size, source)

    def workers(self) -> dict[int, tuple[int, int, int]]:
        """Returns the depths in blocks of each worker's rank 0, as indexer and selection count."""
        partition = self.state.partition(*KEY)
        partition.index.verify()
        found, _ = partition.index.match(LOCALS)
        return {worker: depths for (worker, rank), depths in found.items() if rank == 0}

    def frequencies(self) -> list[int]:
        return self.state.partition(*KEY).index.match(LOCALS)[1]

    def rows(self, size: int = BLOCK_SIZE) -> dict[str, Any]:
        part = self.state.sized[(*KEY, size)].conductor
        part.verify()
        rows = part.match_tokens(TOKENS)
        assert rows == part.match_hashes(sequence_hashes(TOKENS, size, 1337))
        return rows

    def asked(self, **members: Any) -> Any:
        """Returns the conductor's answer by tokens, which must equal the answer by hashes."""
        usual = {"model": "m", "block_size": BLOCK_SIZE} | members
        answers = [
            self.answer("/query", usual | {"token_ids": TOKENS}),
            self.answer("/query_by_hash", usual | {"seq_hashes": SEQUENCES}),
        ]
        assert answers[0] == answers[1]
        return answers[0]

    def answer(self, path: str, members: dict[str, Any]) -> Any:
        routes = conductor.routes(self.state, cast(Publishers, None))
        route = next(each for each in routes if each.path == path)
        body = json.dumps(members).encode()
        request = Request("POST", path, b"", [], body)

        async def call() -> Response:
            answered = route.handler(request)
            return answered if isinstance(answered, Response) else await answered

        handled = trio.run(call).body
        # The handler answers the same at once when it has nothing to wait for.
        again = route.handler(request)
        assert isinstance(again, Response) and again.body == handled
        return json.loads(cast(bytes, handled))


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


def test_a_publisher_with_a_number_is_a_worker_elsewhere(fleet: Fleet) -> None:
    source, publication = fleet.publisher("7")
    publication.apply(batch(STORED))
    assert fleet.rows()["7"]["GPU"] == 12
    assert fleet.workers() == {7: (3, 3, 3)}
    assert fleet.frequencies() == [1, 1, 1]
    publication.apply(batch(["BlockStored", [4], 3, TOKENS[12:], BLOCK_SIZE, None, "CPU"]))
    assert fleet.workers() == {7: (3, 4, 4)}
    fleet.leave(source)
    with pytest.raises(NotFound):
        fleet.state.partition(*KEY)


def test_a_publisher_without_one_is_not(fleet: Fleet) -> None:
    fleet.publisher("7")[1].apply(batch(STORED))
    fleet.publisher("seven")[1].apply(batch(STORED))
    assert fleet.rows().keys() == {"7", "seven"}
    assert fleet.workers() == {7: (3, 3, 3)}
    assert fleet.frequencies() == [1, 1, 1]


def test_a_worker_is_an_instance_of_the_conductor(fleet: Fleet) -> None:
    stream = fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE)
    stream.apply(batch(STORED))
    fleet.publisher("a")
    stream.apply(batch(["BlockStored", [4], 3, TOKENS[12:], BLOCK_SIZE, None, "CPU"]))
    assert fleet.rows()["8"] == {
        "longest_matched": 16, "GPU": 12, "CPU": 4, "DISK": 0, "DP": {"0": 16},
    }  # fmt: skip
    fleet.state.remove_rank(RankKey(KEY, 8, 0))
    assert fleet.rows().keys() == {"a"}


def row(gpu: int, **others: Any) -> dict[str, Any]:
    """Returns a row with rank 0 alone."""
    usual = {"longest_matched": gpu, "GPU": gpu, "CPU": 0, "DISK": 0, "DP": {"0": gpu}}
    return usual | others


def test_workers_are_instances_where_nobody_publishes(fleet: Fleet) -> None:
    """A worker announced blocks before the first question, and has a rank that holds nothing."""
    stream = fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE)
    stream.apply(batch(STORED))
    fleet.state.add_rank(RankKey(KEY, 8, 1), BLOCK_SIZE)
    fleet.state.add_rank(RankKey(KEY, 9, 0), BLOCK_SIZE)
    assert fleet.asked() == {"default": {"8": row(12, DP={"0": 12, "1": 0}), "9": row(0)}}
    assert fleet.asked(instance_id="9") == {"default": {"9": row(0)}}
    assert fleet.asked(instance_id="10") == fleet.asked(block_size=8) == {"default": {}}
    assert fleet.asked(tenant_id="other") == {"other": {}}
    stream.apply(batch(["BlockStored", [4], 3, TOKENS[12:], BLOCK_SIZE, None, "CPU"]))
    both = row(12, longest_matched=16, CPU=4, DP={"0": 16, "1": 0})
    assert fleet.asked(instance_id="8") == {"default": {"8": both}}
    for rank in ((8, 0), (8, 1), (9, 0)):
        fleet.state.remove_rank(RankKey(KEY, *rank))
    assert fleet.asked() == {"default": {}}
    assert not fleet.state.sized


def test_salted_blocks_of_before_the_first_question_are_found_by_tokens(fleet: Fleet) -> None:
    stream = fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE)
    payload = batch([*STORED, None, [["secret"], None, None]])
    stream.apply(payload)
    usual = {"model": "m", "block_size": BLOCK_SIZE, "cache_salt": "secret"}
    assert fleet.answer("/query", usual | {"token_ids": TOKENS})["default"]["8"]["GPU"] == 12
    # Their sequence hashes could only be computed from the tokens, which are not kept.
    by_hash = usual | {"seq_hashes": SEQUENCES}
    assert fleet.answer("/query_by_hash", by_hash)["default"]["8"]["GPU"] == 0
    stream.apply(payload)
    assert fleet.asked(cache_salt="secret")["default"]["8"]["GPU"] == 12
    assert fleet.asked()["default"]["8"]["GPU"] == 0


def test_what_a_dump_has_told_of_has_a_row_where_it_matches(fleet: Fleet) -> None:
    partition = fleet.state.open_partition(KEY, BLOCK_SIZE)
    restored = fleet.state.restored_worker(partition, 8)
    assert restored is not None
    restored.store(0, [1, 2], LOCALS[:2])
    assert fleet.asked() == {"default": {"8": row(8)}}
    other = {"model": "m", "block_size": BLOCK_SIZE, "token_ids": [99] * 4}
    assert fleet.answer("/query", other) == {"default": {}}


def test_another_hash_seed_is_kept_from_the_beginning(fleet: Fleet) -> None:
    fleet.state = State(hash_seed=42)
    stream = fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE)
    stream.apply(batch(STORED))
    hashes = sequence_hashes(TOKENS, BLOCK_SIZE, 42)
    members = {"model": "m", "block_size": BLOCK_SIZE, "seq_hashes": hashes}
    assert fleet.answer("/query_by_hash", members) == {"default": {"8": row(12)}}
    assert fleet.workers() == {8: (3, 3, 3)}


async def test_the_first_questions_by_hash_wait_for_a_large_partition(fleet: Fleet) -> None:
    fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE).apply(batch(STORED))
    worker = fleet.state.partition(*KEY).workers[8]
    for name in range(100, 100 + 3 * conductor.SEQUENCE_STEPS):
        worker.store(0, [name], [name])
    part = fleet.state.sized[(*KEY, BLOCK_SIZE)].conductor
    members = {"model": "m", "block_size": BLOCK_SIZE, "seq_hashes": SEQUENCES}
    request = Request("POST", "/query_by_hash", b"", [], json.dumps(members).encode())
    waited = 0
    answers = []

    routes = conductor.routes(fleet.state, cast(Publishers, None))
    route = next(each for each in routes if each.path == request.path)
    assert route.waits

    async def ask() -> None:
        response = await cast(Awaitable[Response], route.handler(request))
        answers.append(json.loads(cast(bytes, response.body)))

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(ask)
        while len(answers) < 3:
            waited += 1
            await trio.lowlevel.checkpoint()
    assert answers == [{"default": {"8": row(12)}}] * 3
    assert waited > 6  # two steps for each block
    assert part.sequence(0)


def test_sweeps_make_the_sequence_hashes_that_a_publisher_needs(fleet: Fleet) -> None:
    fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE).apply(batch(STORED))
    worker = fleet.state.partition(*KEY).workers[8]
    for name in range(100, 5_000):
        worker.store(0, [name], [name])
    _, publication = fleet.publisher("a", store=True)
    publication.apply(batch({"event_type": "stored", "seq_hashes": SEQUENCES, "medium": "cpu"}))
    part = fleet.state.sized[(*KEY, BLOCK_SIZE)].conductor
    assert not part.sequence(0)
    while fleet.state.sweep(1000):
        part.verify()
    assert part.sequence(0)
    assert fleet.rows()["a"]["CPU"] == 16
    assert part.stats()["waiting"] == 0  # the question has the fourth block's tokens


def test_the_global_view_has_workers_too(fleet: Fleet) -> None:
    fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE)
    fleet.state.add_rank(RankKey(KEY, 8, 1), BLOCK_SIZE)
    publishers = Publishers(fleet.state, None)  # type: ignore[arg-type]
    request = Request("GET", "", b"", [], b"")
    viewed = trio.run(conductor.global_view, fleet.state, publishers, request)
    assert json.loads(cast(bytes, viewed.body)) == {
        "context_count": 1,
        "model_contexts": [
            {"model_name": "m", "lora_name": "", "block_size": BLOCK_SIZE, "additional_salt": "",
             "tenant_id": "default", "instance_id": "8"},
        ],
    }  # fmt: skip


def test_both_registrations_of_one_id_add_up(fleet: Fleet) -> None:
    rank = RankKey(KEY, 7, 0)
    stream = fleet.state.add_rank(rank, BLOCK_SIZE)
    source, publication = fleet.publisher("7")
    stream.apply(batch(["BlockStored", [1, 2], None, TOKENS[:8], BLOCK_SIZE, None, "GPU"]))
    publication.apply(batch(STORED))
    publication.apply(batch(["BlockRemoved", [1], "GPU"]))
    assert fleet.workers() == {7: (3, 3, 3)}
    assert fleet.frequencies() == [1, 1, 1]
    assert fleet.rows()["7"]["GPU"] == 12
    fleet.leave(source)
    assert fleet.workers() == {7: (2, 2, 2)}
    source, publication = fleet.publisher("7")
    publication.apply(batch(STORED))
    fleet.state.remove_rank(rank)
    assert fleet.workers() == {7: (3, 3, 3)}
    assert fleet.rows()["7"]["GPU"] == 12
    fleet.state.add_rank(rank, BLOCK_SIZE).clear()
    assert fleet.workers() == {7: (3, 3, 3)}
    fleet.leave(source)
    assert fleet.workers() == {}


@pytest.mark.parametrize("is_named_first", [False, True])
def test_a_store_serves_ranks_that_only_batches_name(fleet: Fleet, is_named_first: bool) -> None:
    _, publication = fleet.publisher("7", store=True)
    stream = fleet.state.add_rank(RankKey(KEY, 7, 0), BLOCK_SIZE)
    named = batch(["BlockStored", [1], None, TOKENS[:4], BLOCK_SIZE, None, "GPU"], rank=1)
    shared = batch({"event_type": "stored", "seq_hashes": SEQUENCES[:3], "medium": "cpu"})
    steps = [(publication, shared), (stream, named)]
    for each, payload in reversed(steps) if is_named_first else steps:
        each.apply(payload)
    assert fleet.rows()["7"]["longest_matched"] == 12
    index = fleet.state.partition(*KEY).index
    assert index.match(LOCALS)[0] == {(7, 0): (0, 3, 3), (7, 1): (1, 3, 3)}


def test_ranks_go_with_the_publishers_that_brought_them(fleet: Fleet) -> None:
    """A worker keeps ranks that are registered elsewhere, or that its own engines publish for."""
    stream = fleet.state.add_rank(RankKey(KEY, 7, 1), BLOCK_SIZE)
    pool = fleet.publisher("7", store=True, rank=9)[0]
    sources = []
    for rank in (0, 1, 2, 3):
        source, publication = fleet.publisher("7", rank=rank)
        sources.append(source)
        publication.apply(batch(STORED, rank=rank + 4))
    worker = fleet.state.partition(*KEY).workers[7]
    assert worker.ranks() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    assert fleet.rows()["7"]["DP"].keys() == {*"012345679"}
    stream.apply(batch(STORED, rank=2))
    stream.apply(batch(["BlockRemoved", [1, 2, 3], "GPU"], rank=2))
    fleet.leave(sources[0])
    assert worker.ranks() == [1, 2, 3, 5, 6, 7, 9]
    for source in (*sources[1:], pool):
        fleet.leave(source)
    assert worker.ranks() == [1, 2]
    assert fleet.rows()["7"]["DP"] == {"1": 0, "2": 0}
    fleet.publisher("7", rank=3)
    fleet.state.remove_rank(RankKey(KEY, 7, 1))
    assert fleet.state.partition(*KEY).workers[7].ranks() == [3]


def test_publishers_of_any_ranks_come_and_go(fleet: Fleet) -> None:
    """A worker may have 4096 ranks at a time; earlier ones must not count towards that."""
    fleet.publisher("7")
    for rank in range(4096):
        fleet.leave(fleet.publisher("7", rank=rank)[0])
    fleet.publisher("7", rank=4096)[1].apply(batch(STORED))
    partition = fleet.state.partition(*KEY)
    assert partition.workers[7].ranks() == [0, 4096]
    assert partition.index.match(LOCALS)[0] == {(7, 4096): (3, 3, 3)}


def test_the_indexer_s_answer_shows_publishers(fleet: Fleet) -> None:
    fleet.publisher("7", rank=2)[1].apply(batch(STORED))
    scanner = BodyScanner({"token_ids": "u32"})
    scanner.scan(json.dumps({"token_ids": TOKENS}).encode())
    answer = json.loads(fleet.state.partition(*KEY).index.query_tokens(scanner, 0))
    assert answer == {
        "scores": {"7": {"2": 12}},
        "frequencies": [1, 1, 1],
        "instances": {
            "7": {"longest_matched": 12, "gpu": 12, "dp": {"2": 12}, "cpu": 12, "disk": 12}
        },
    }


def test_a_store_serves_every_rank_of_its_worker(fleet: Fleet) -> None:
    hashes = sequence_hashes(TOKENS, BLOCK_SIZE, 1337)
    pool, publication = fleet.publisher("7", store=True)
    publication.apply(batch({"event_type": "stored", "seq_hashes": hashes, "medium": "cpu"}))
    stream = fleet.state.add_rank(RankKey(KEY, 7, 1), BLOCK_SIZE)
    stream.apply(batch(["BlockStored", [1, 2], None, TOKENS[:8], BLOCK_SIZE, None, "GPU"]))
    partition = fleet.state.partition(*KEY)
    assert partition.index.match(LOCALS[:2])[0] == {(7, 0): (0, 2, 2), (7, 1): (2, 2, 2)}
    source, other = fleet.publisher("7", rank=2)
    other.apply(batch(["BlockStored", [1, 2, 3, 4], None, TOKENS, BLOCK_SIZE, None, "GPU"]))
    other.apply(batch(["BlockRemoved", [2, 3, 4], "GPU"]))
    depths = {(7, 0): (0, 4, 4), (7, 1): (2, 4, 4), (7, 2): (1, 4, 4)}
    assert partition.index.match(LOCALS)[0] == depths
    assert partition.index.match(LOCALS)[1] == [2, 1]
    row = fleet.rows()["7"]
    assert (row["longest_matched"], row["CPU"]) == (16, 16)
    assert row["DP"] == {"0": 0, "1": 8, "2": 4}
    publication.clear()
    assert partition.index.match(LOCALS)[0] == {(7, 1): (2, 2, 2), (7, 2): (1, 1, 1)}
    publication.apply(batch({"event_type": "stored", "seq_hashes": hashes, "medium": "gpu"}))
    depths = {(7, 0): (4, 4, 4), (7, 1): (4, 4, 4), (7, 2): (4, 4, 4)}
    assert partition.index.match(LOCALS)[0] == depths
    assert partition.index.match(LOCALS)[1] == [3, 3, 3, 3]
    fleet.state.remove_rank(RankKey(KEY, 7, 1))
    assert partition.index.match(LOCALS)[0].keys() == {(7, 0), (7, 2)}
    fleet.leave(source)
    fleet.leave(pool)
    assert not fleet.state.partitions


def test_an_engine_s_second_copy_takes_a_second_removal(fleet: Fleet) -> None:
    _, publication = fleet.publisher("7")
    last = ["BlockStored", [3], 2, TOKENS[8:12], BLOCK_SIZE, None, "GPU"]
    publication.apply(batch(STORED, last))
    for left in (12, 8):
        publication.apply(batch(["BlockRemoved", [3], "GPU"]))
        assert fleet.rows()["7"]["GPU"] == left
        assert fleet.workers() == {7: (left // 4,) * 3}
    publication.apply(batch(last, last))
    assert fleet.rows()["7"]["GPU"] == 12
    # A removal by the standard is about the hash, whichever event has announced the block.
    publication.apply(batch({"event_type": "removed", "seq_hashes": [3], "medium": "gpu"}))
    assert fleet.rows()["7"]["GPU"] == 8


def grouped(hashes: list[int], parent: int | None, group: int, kind: str | None) -> dict[str, Any]:
    """Returns vLLM's event for one cache group; a sliding window has 9 tokens, 2 blocks."""
    event = {
        "type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent,
        "token_ids": TOKENS[: len(hashes) * BLOCK_SIZE], "block_size": BLOCK_SIZE, "medium": "GPU",
        "group_idx": group, "kv_cache_spec_kind": kind,
    }  # fmt: skip
    return event | ({"kv_cache_spec_sliding_window": 9} if kind == "sliding_window" else {})


@pytest.mark.parametrize("published", [True, False])
def test_a_window_group_ends_a_prefix_on_every_face(fleet: Fleet, published: bool) -> None:
    take: Callable[[bytes], object]
    if published:
        take = fleet.publisher("7")[1].apply
    else:
        take = fleet.state.add_rank(RankKey(KEY, 7, 0), BLOCK_SIZE).apply
    hashes = [1, 2, 3, 4]
    take(batch(grouped(hashes, None, 0, "full_attention")))
    assert fleet.rows() == {"7": row(16)}
    take(batch(grouped(hashes, None, 1, "sliding_window")))
    assert fleet.rows() == {"7": row(16)}
    gone = {"type": "BlockRemoved", "block_hashes": [1, 3], "medium": "GPU", "group_idx": 1}
    take(batch(gone))
    # The group must hold the last two blocks of a prefix; of each two in a row one is gone now.
    assert fleet.rows() == {"7": row(0)}
    assert fleet.workers() == {}
    take(batch(grouped([1, 2], None, 1, "sliding_window")))
    assert fleet.rows() == {"7": row(8)}
    assert fleet.workers() == {7: (2, 2, 2)}
    # Blocks on lower tiers continue from there.
    lower = ["BlockStored", [1, 2, 3], None, TOKENS[:12], BLOCK_SIZE, None, "CPU"]
    take(batch(lower))
    assert fleet.rows() == {"7": row(8, longest_matched=12, CPU=12, DP={"0": 12})}
    assert fleet.workers() == {7: (2, 3, 3)}
    take(batch(["AllBlocksCleared"]))
    assert fleet.rows()["7"]["GPU"] == 0


def test_what_a_store_tells_without_tokens_is_found_once_a_worker_has_told(fleet: Fleet) -> None:
    _, publication = fleet.publisher("a", store=True)
    hashes = sequence_hashes(TOKENS, BLOCK_SIZE, 1337)
    store = {"event_type": "stored", "seq_hashes": hashes, "medium": "cpu"}
    publication.apply(batch(store))
    part = fleet.state.sized[(*KEY, BLOCK_SIZE)].conductor
    assert part.stats()["waiting"] == 4
    fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE).apply(batch(STORED))
    assert part.stats()["waiting"] == 1
    assert (fleet.rows()["a"]["CPU"], part.stats()["waiting"]) == (16, 0)
    publication.apply(batch({"event_type": "removed", "seq_hashes": hashes[:1]}))
    assert fleet.rows()["a"]["longest_matched"] == 0


def test_a_question_tells_every_face_where_blocks_without_tokens_are(fleet: Fleet) -> None:
    """Only a store has announced them, by sequence hash; the first question has their tokens."""
    pool, publication = fleet.publisher("7", store=True)
    store = {"event_type": "stored", "seq_hashes": SEQUENCES, "medium": "cpu"}
    publication.apply(batch(store))
    fleet.publisher("7")
    assert pool.stats() | {"asked": 0} == {"blocks": 0, "waiting": 4, "asked": 0, "matched": 0}
    assert fleet.workers() == {7: (0, 4, 4)}
    assert (pool.stats()["blocks"], pool.stats()["waiting"]) == (4, 0)
    assert fleet.rows()["7"]["CPU"] == 16
    publication.apply(batch(store | {"event_type": "removed", "seq_hashes": SEQUENCES[1:]}))
    assert fleet.workers() == {7: (0, 1, 1)}


def test_a_question_explains_only_its_own_beginning(fleet: Fleet) -> None:
    """Blocks behind one that no rank holds stay unexplained, and do not count as a beginning."""
    pool, publication = fleet.publisher("7", store=True)
    fleet.publisher("7")
    store = {"event_type": "stored", "seq_hashes": [SEQUENCES[0], *SEQUENCES[2:]], "medium": "cpu"}
    publication.apply(batch(store))
    assert fleet.workers() == {7: (0, 1, 1)}
    assert pool.stats()["waiting"] == 2
    publication.apply(batch(store | {"seq_hashes": [SEQUENCES[1]]}))
    assert fleet.workers() == {7: (0, 4, 4)}


def test_a_long_prompt_is_explained_bit_by_bit(fleet: Fleet) -> None:
    """A question explains a bounded part, but its own answer counts the whole prompt."""
    tokens = list(range(2000))
    pool, publication = fleet.publisher("7", store=True)
    sequences = sequence_hashes(tokens, BLOCK_SIZE, 1337)
    stored = batch({"event_type": "stored", "seq_hashes": sequences, "medium": "cpu"})
    applied = publication.apply(stored)
    while applied == UNFINISHED:
        applied = publication.advance()
    part = fleet.state.sized[(*KEY, BLOCK_SIZE)].conductor
    waiting = []
    while pool.stats()["waiting"]:
        assert part.match_tokens(tokens)["7"]["CPU"] == 2000
        waiting.append(pool.stats()["waiting"])
        part.verify()
    assert waiting == [244, 0]


@pytest.mark.parametrize("adapter", ["", "sql"])
def test_a_store_for_every_instance(fleet: Fleet, adapter: str) -> None:
    """It has no row; publishers and workers share its blocks, in whatever order they come."""
    source, publication = fleet.publisher("*", store=True)
    store = {"event_type": "stored", "event_id": 1, "seq_hashes": [], "medium": "cpu"}
    publication.apply(batch(store | {"object_key": f"m@tp_rank:0@{2:032x}"}))
    fleet.state.add_rank(RankKey(KEY, 8, 0), BLOCK_SIZE)
    stream = fleet.state.add_rank(RankKey(KEY, 9, 0), BLOCK_SIZE)
    fleet.publisher("a")
    named = {"type": "BlockStored", "block_hashes": [1, 2, 3], "parent_block_hash": None,
             "token_ids": TOKENS[:12], "block_size": BLOCK_SIZE, "lora_name": adapter or None,
             "medium": "GPU"}  # fmt: skip
    stream.apply(batch(named))
    stream.apply(batch(["BlockRemoved", [1, 2, 3], "GPU"]))
    publication.apply(batch(store | {"event_id": 2, "object_key": f"m@tp_rank:0@{1:032x}"}))
    part = fleet.state.sized[(*KEY, BLOCK_SIZE)].conductor
    part.verify()
    assert source.stats()["waiting"] == 1  # the engine no longer has the first block's name
    stream.apply(batch(named))
    found = part.match_tokens(TOKENS, adapter)
    assert {name: row["CPU"] for name, row in found.items()} == {"8": 8, "9": 8, "a": 8}
    assert (found["9"]["GPU"], found["8"]["DP"], found["a"]["DP"]) == (12, {"0": 0}, {"0": 0})
    assert (source.stats()["asked"], source.stats()["matched"]) == (1, 1)
    locals_ = local_hashes(TOKENS, BLOCK_SIZE, adapter or None)
    depths, _ = fleet.state.partition(*KEY).index.match(locals_)
    assert depths == {(8, 0): (0, 2, 2), (9, 0): (3, 3, 3)}
    later = fleet.state.add_rank(RankKey(KEY, 10, 0), BLOCK_SIZE)
    assert later and fleet.state.partition(*KEY).index.match(locals_)[0][10, 0] == (0, 2, 2)
    fleet.leave(source)
    assert fleet.state.partition(*KEY).index.match(locals_)[0] == {(9, 0): (3, 3, 3)}


def test_salted_blocks_stay_apart_on_every_face(fleet: Fleet) -> None:
    fleet.publisher("7")[1].apply(batch([*STORED, None, [["secret"], None, None]]))
    assert fleet.workers() == {}
    salted, _ = fleet.state.partition(*KEY).index.match(
        local_hashes(TOKENS, BLOCK_SIZE, None, "secret")
    )
    assert salted == {(7, 0): (3, 3, 3)}


def test_a_salted_query_counts_what_publishers_and_the_worker_s_own_stream_announced(
    fleet: Fleet,
) -> None:
    fleet.state.add_rank(RankKey(KEY, 7, 0), BLOCK_SIZE)
    _, publication = fleet.publisher("7")
    salted = ["secret"]
    publication.apply(batch([*STORED, None, [salted, None, None]]))
    last = ["BlockStored", [4], 3, TOKENS[12:], BLOCK_SIZE, None, "CPU", None, [salted]]
    publication.apply(batch(last))
    scanner = BodyScanner({"token_ids": "u32"})
    scanner.scan(json.dumps({"token_ids": TOKENS}).encode())

    def reached() -> tuple[int, int, int]:
        index = fleet.state.partition(*KEY).index
        row = json.loads(index.query_tokens(scanner, 0, None, "secret"))["instances"]["7"]
        return row["gpu"], row["cpu"], row["disk"]

    def holders() -> list[int]:
        index = fleet.state.partition(*KEY).index
        found: list[int] = json.loads(index.query_tokens(scanner, 0, None, "secret"))["frequencies"]
        return found

    assert (reached(), holders()) == ((12, 16, 16), [1, 1, 1])
    worker = fleet.state.partition(*KEY).workers[7]
    worker.store(0, [10, 11], LOCALS[:2])  # its own stream has not shown that it announces salts
    other = fleet.state.partition(*KEY).index.add_worker(8)
    other.store(0, [10], LOCALS[:1])
    assert (reached(), holders()) == ((12, 16, 16), [2, 1, 1])
    publication.apply(batch(["BlockRemoved", [1], "GPU"]))
    assert (reached(), holders()) == ((8, 8, 8), [2, 1])


def test_other_block_sizes_lie_beside(fleet: Fleet) -> None:
    four, publication = fleet.publisher("7")
    publication.apply(batch(STORED))
    eight, other = fleet.publisher("7", size=8)
    other.apply(batch(["BlockStored", [1], None, TOKENS[:8], 8, None, "GPU"]))
    assert fleet.rows(8)["7"]["GPU"] == 8
    assert fleet.workers() == {7: (3, 3, 3)}
    # Faces with workers use the block size of their first worker.
    fleet.state.add_rank(RankKey(KEY, 9, 0), 8)
    assert fleet.state.partition(*KEY).block_size == 8
    assert fleet.rows()["7"]["GPU"] == 12
    found, _ = fleet.state.partition(*KEY).index.match(local_hashes(TOKENS, 8))
    assert found == {(7, 0): (1, 1, 1)}
    with pytest.raises(Conflict):
        fleet.state.add_rank(RankKey(KEY, 9, 0), BLOCK_SIZE)
    fleet.state.remove_rank(RankKey(KEY, 9, 0))
    fleet.leave(four)
    fleet.leave(eight, 8)
    assert not fleet.state.partitions and not fleet.state.sized


def test_each_face_removes_only_its_own(fleet: Fleet) -> None:
    fleet.publisher("7")[1].apply(batch(STORED))
    assert fleet.state.strays(7, "m", None) == []
    registry = Registry(fleet.state, None)  # type: ignore[arg-type]
    assert list(registry.owned_by(INDEXER)) == []
    assert fleet.workers() == {7: (3, 3, 3)}


def test_partitions_are_bounded_together(fleet: Fleet) -> None:
    assert fleet.state.max_partitions == 16_384
    fleet.state.max_partitions = 2
    fleet.publisher("a")
    fleet.publisher("a", size=8)
    from kvd.errors import Unavailable

    with pytest.raises(Unavailable):
        fleet.publisher("a", size=16)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("7", 7), (str(2**64 - 1), 2**64 - 1), (str(2**64), None), ("07", None),
     ("-1", None), ("", None), ("a", None), ("٣", None), ("1" * 30, None)],
)  # fmt: skip
def test_numbers_are_plain_decimal_texts(text: str, number: int | None) -> None:
    assert number_of(text) == number


def test_a_hidden_partition_comes_back_with_all_its_instances(fleet: Fleet) -> None:
    """It comes back when the workers with another block size are gone, by any publisher's event."""
    for instance in ("7", "8", "a"):
        fleet.publisher(instance)[1].apply(batch(STORED))
    rank = RankKey(KEY, 9, 0)
    fleet.state.add_rank(rank, 8)
    assert fleet.workers() == {}
    fleet.state.remove_rank(rank)
    assert fleet.workers() == {7: (3, 3, 3), 8: (3, 3, 3)}


def test_a_partition_of_texts_alone_stays_hidden(fleet: Fleet) -> None:
    fleet.publisher("a")
    fleet.state.add_rank(RankKey(KEY, 9, 0), 8)
    fleet.state.remove_rank(RankKey(KEY, 9, 0))
    assert not fleet.state.partitions
    fleet.publisher("7")
    assert fleet.state.partition(*KEY).block_size == BLOCK_SIZE


def test_totals_outlive_a_partition_once(fleet: Fleet) -> None:
    source, publication = fleet.publisher("7")
    publication.apply(batch(["BlockRemoved", [5], "GPU"]))
    assert fleet.state.partition(*KEY).index.stats()["removed_unknown"] == 1
    fleet.leave(source)
    assert fleet.state.ended_totals["removed_unknown"] == 1


def test_a_publisher_leaves_a_peer_s_word_of_its_worker_behind(fleet: Fleet) -> None:
    source, publication = fleet.publisher("7")
    restored = fleet.state.restored_worker(fleet.state.partition(*KEY), 7)
    assert restored is not None
    restored.store(0, [1, 2], LOCALS[:2])
    publication.apply(batch(STORED))
    assert fleet.workers() == {7: (3, 3, 3)}
    fleet.leave(source)
    assert fleet.workers() == {7: (2, 2, 2)}
    source, publication = fleet.publisher("7")
    publication.apply(batch(["BlockStored", [1], None, TOKENS[:4], BLOCK_SIZE, None, "GPU"]))
    assert fleet.workers() == {7: (2, 2, 2)}
    (partition,) = fleet.state.strays(7, "m", None)
    assert fleet.state.remove_stray(partition, 7, 0)
    assert fleet.workers() == {7: (1, 1, 1)}
    assert fleet.state.strays(7, "m", None) == []
    fleet.leave(source)
    assert not fleet.state.partitions
