"""Sequence hashes of the tree's blocks: the standard's vectors, and when they become known."""

from __future__ import annotations

import msgpack
import pytest

from kvd_core.base.hashing import local_hashes
from kvd_core.conductor.conductor import DEFAULT_SEED, Conductor, namespace
from kvd_core.index.prefix_index import IngestStats, PrefixIndex
from tests.models.conductor_model import sequence_hashes

TOP = 2**32 - 1
VECTORS = [
    (range(1, 4), 1, 1337, [14426539925402682893, 12095906288214270103, 7197499903451023458]),
    (
        [101, 15, 100, 55, 89, 63],
        2,
        1337,
        [11345600125438922323, 2624253222771150309, 16544039871701005792],
    ),
    (
        range(1, 17),
        4,
        1337,
        [14643705804678351452, 4945711292740353085, 12583592247330656132, 1921452330601040443],
    ),
    (range(1, 33), 16, 1337, [16863443419780771464, 12466389667045779788]),
    ([0] * 32, 16, 1337, [5523182284766269584, 3102875163438626881]),
    ([TOP] * 8, 4, 1337, [12410542959481710713, 12910963785220126862]),
    (
        [128000, 9906, 1917, 0, 128001, 0, 1, 2],
        4,
        1337,
        [2861335496493652048, 1419557709666655783],
    ),
    (
        range(1, 257),
        64,
        1337,
        [17732852320395450624, 1050256074108617503, 15102350600477259534, 16467128916255533240],
    ),
    (
        range(1, 385),
        128,
        1337,
        [9108660569462882936, 3567918185176555655, 6341327244602509308],
    ),
    (range(1, 513), 256, 1337, [6483570558441252529, 4746021824150214572]),
    (range(1, 9), 4, 0, [8052976908588476977, 4185132130981121146]),
    (range(1, 9), 4, 42, [14608671080364358214, 2039199032896062926]),
    (range(1, 9), 4, 2**64 - 1, [2498564416888662579, 7915251108642614200]),
]


@pytest.mark.parametrize(("tokens", "size", "seed", "hashes"), VECTORS)
@pytest.mark.parametrize("scope", [("", ""), ("adapter", ""), ("", "salt"), ("a", "s")])
def test_the_standard_s_vectors(
    tokens: list[int], size: int, seed: int, hashes: list[int], scope: tuple[str, str]
) -> None:
    assert sequence_hashes(list(tokens), size, seed) == hashes
    conductor = Conductor(PrefixIndex(size, IngestStats()), seed)
    source = conductor.add_source("a", *scope, 0, False)
    names = list(range(1000, 1000 + len(hashes)))
    source.store(0, 0, "GPU", names, tokens, None, namespace(*scope))
    conductor.verify()
    for asked, depth in ((hashes, len(hashes)), (hashes[1:], 0), (names, 0)):
        row = conductor.match_hashes(asked, *scope)["a"]
        assert row["longest_matched"] == depth * size
    assert conductor.match_hashes(hashes, "other")["a"]["longest_matched"] == 0


def test_blocks_that_are_there_get_theirs_when_they_are_asked_for() -> None:
    index = PrefixIndex(4, IngestStats())
    worker = index.add_worker(7)
    worker.register(0)
    tokens = list(range(2000 * 4))
    names = list(range(2000))
    worker.store(0, names, local_hashes(tokens, 4))
    worker.store(0, [5000], [17], 999)  # a branch, which splits the chain
    before = index.stats()["bytes"]
    conductor = Conductor(index)
    conductor.verify()
    hashes = sequence_hashes(tokens, 4, DEFAULT_SEED)
    assert conductor.match_hashes(hashes)["7"]["GPU"] == 8000
    assert 13 <= (index.stats()["bytes"] - before) / 2000 <= 19
    for name in reversed(names):
        worker.drop(0, [name])
        if name % 200 == 0:
            conductor.verify()
    worker.drop(0, [5000])
    conductor.verify()
    assert index.stats()["blocks"] == 0
    worker.store(0, names, local_hashes(tokens, 4))
    assert conductor.match_hashes(hashes)["7"]["GPU"] == 8000


def test_a_worker_s_salted_blocks_are_known_once_they_are_stored_again() -> None:
    index = PrefixIndex(4, IngestStats())
    stream = index.add_worker(7).stream(0)
    event = ["BlockStored", [1, 2], None, list(range(8)), 4, None, "GPU", None, [["s"], None]]
    payload = msgpack.packb([0.0, [event]])
    stream.apply(payload)
    conductor = Conductor(index)
    hashes = sequence_hashes(list(range(8)), 4, DEFAULT_SEED)
    assert "7" not in conductor.match_hashes(hashes, "", "s")
    assert conductor.match_tokens(range(8), "", "s")["7"]["GPU"] == 8
    stream.apply(payload)
    assert conductor.match_hashes(hashes, "", "s")["7"]["GPU"] == 8
    assert "7" not in conductor.match_hashes(hashes)
    conductor.verify()


@pytest.mark.parametrize("scope", [("", ""), ("a", ""), ("", "s"), ("a", "s")])
@pytest.mark.parametrize("seed", [DEFAULT_SEED, 42])
def test_the_text_before_an_image_has_the_sequence_hashes_of_text(
    seed: int, scope: tuple[str, str]
) -> None:
    index = PrefixIndex(4, IngestStats())
    conductor = Conductor(index, seed)
    stream = index.add_worker(7).stream(0)
    hashes = sequence_hashes(list(range(16)), 4, seed)
    assert conductor.match_hashes(hashes) == {}  # from now on sequence hashes are kept
    lora_name, salt = scope

    def store(names: list[int], image: list[list[object]]) -> None:
        keys = [[salt] * bool(salt), [], image, []][: len(names)]
        stored = names, None, list(range(4 * len(names))), 4, None, "GPU", lora_name or None, keys
        stream.apply(msgpack.packb([0.0, [["BlockStored", *stored]]]))
        conductor.verify()

    store([1, 2, 3, 4], [["image", 0]])
    assert conductor.match_hashes(hashes, *scope)["7"]["GPU"] == 8
    store([1, 2, 5], [])
    assert conductor.match_hashes(hashes, *scope)["7"]["GPU"] == 12


@pytest.mark.parametrize("seed", [DEFAULT_SEED, 42])
def test_what_an_engine_offloads_is_what_it_was(seed: int) -> None:
    """vLLM's connectors announce what they offload without salt, images and adapter."""
    index = PrefixIndex(4, IngestStats())
    conductor = Conductor(index, seed)
    events = conductor.add_source("v", "", "", 0, False).engine_events("", "")
    hashes = sequence_hashes(list(range(8)), 4, seed)
    base = {"type": "BlockStored", "parent_block_hash": None, "block_size": 4, "group_idx": 0}
    base["token_ids"] = list(range(8))
    image = [None, [["i", 0]]]
    prompts = ({"extra_keys": [["s"], None]}, {"lora_name": "a"}, {"extra_keys": image})
    for first, members in zip((11, 21, 31), prompts, strict=True):
        names = {"block_hashes": [first, first + 1]}
        events.apply(msgpack.packb([0.0, [base | names | members | {"medium": "GPU"}]]))
        events.apply(msgpack.packb([0.0, [base | names | {"medium": "CPU"}]]))
        conductor.verify()
        index.verify()
    for scope, depth in ((("", "s"), 8), (("a", ""), 8), (("", ""), 4)):
        for row in (
            conductor.match_tokens(range(8), *scope)["v"],
            conductor.match_hashes(hashes, *scope)["v"],
        ):
            assert (row["GPU"], row["CPU"]) == (depth, depth)


def test_pairs_of_tokens_do_not_have_the_sequence_hashes_of_text() -> None:
    index = PrefixIndex(4, IngestStats())
    conductor = Conductor(index)
    stream = index.add_worker(7).stream(0)
    hashes = sequence_hashes(list(range(8)), 4, DEFAULT_SEED)
    assert conductor.match_hashes(hashes) == {}  # from now on sequence hashes are kept
    pairs = [[token, token + 1] for token in range(8)]
    for names in ([1, 2], [1]):
        event = {"type": "BlockStored", "block_hashes": names, "block_size": 4, "cache_salt": "s"}
        event["token_ids"] = pairs[: 4 * len(names)]
        stream.apply(msgpack.packb([0.0, [event]]))
        conductor.verify()
    assert conductor.match_hashes(hashes, "", "s") == {}


def test_what_waits_is_bounded_and_forgotten_with_its_holder() -> None:
    conductor = Conductor(PrefixIndex(4, IngestStats()))
    source = conductor.add_source("a", "", "", 0, True)
    source.store_named(0, None, "CPU", range(1, 100_001), 0)
    assert conductor.stats()["waiting"] == 100_000
    assert conductor.match_hashes([5])["a"]["CPU"] == 4
    source.remove_all()
    other = conductor.add_source("a", "", "", 0, True)
    assert conductor.match_hashes([5])["a"]["CPU"] == 0
    other.store_named(0, None, "CPU", [5], 0)
    assert conductor.match_hashes([5])["a"]["CPU"] == 4
    conductor.verify()


def test_holders_are_bounded_and_those_that_hold_nothing_make_room() -> None:
    conductor = Conductor(PrefixIndex(4, IngestStats()))
    source = conductor.add_source("a", "", "", 0, True)
    for backend in range(4096):
        source.store_named(backend, None, "CPU", [backend], 0)
    assert source.store_named(4096, None, "CPU", [5], 0) == "holders"
    source.remove(7, None, "CPU", [7], 0)
    source.remove(9, None, "CPU", [9], 0)
    assert source.store_named(4096, None, "CPU", [5], 0) == "placed"
    assert [each for each, _ in source.holders()] == [
        each for each in range(4097) if each not in (7, 9)
    ]
    assert source.stats()["waiting"] == 4095
    conductor.verify()


def test_a_block_below_one_of_another_namespace_has_none() -> None:
    conductor = Conductor(PrefixIndex(4, IngestStats()))
    source = conductor.add_source("a", "", "", 0, False)
    tokens = list(range(8))
    hashes = sequence_hashes(tokens, 4, DEFAULT_SEED)
    salted = namespace("", "s")
    # An engine's child block comes before its salted parent, and without a salt of its own.
    source.store(0, 0, "GPU", [2], tokens[4:], 1, 0, inherits=True, by_engine=True)
    source.store(0, 0, "GPU", [1], tokens[:4], None, salted, by_engine=True)
    assert conductor.match_hashes(hashes, "", "s")["a"]["GPU"] == 4
    source.store(0, 1, "CPU", [11, 12], tokens, None, 0)
    assert conductor.match_hashes(hashes)["a"]["CPU"] == 8
    conductor.verify()


def test_a_name_stands_in_whatever_namespace_it_was_told() -> None:
    conductor = Conductor(PrefixIndex(4, IngestStats()))
    source = conductor.add_source("a", "", "", 0, False)
    source.store(0, 0, "GPU", [1], range(4), None, namespace("", "s"), by_engine=True)
    source.store_named(0, 0, "CPU", [1], 0)
    row = conductor.match_tokens(range(4), "", "s")["a"]
    assert (row["GPU"], row["CPU"]) == (4, 4)


def test_what_waited_for_a_source_goes_with_it() -> None:
    index = PrefixIndex(4, IngestStats())
    conductor = Conductor(index)
    kept = conductor.add_source("a", "", "", 0, True)
    kept.store_named(0, None, "CPU", [1, 2, 3], 0)
    source = conductor.add_source("a", "", "", 0, True)
    source.store_named(0, None, "CPU", range(10, 20_000), 0)
    source.remove_all()
    while index.sweep(2_000):
        conductor.verify()
    assert conductor.stats()["waiting"] < 300


def test_many_blocks_wait_for_one() -> None:
    """The beginning of a prompt was never heard, and thousands of requests continue it."""
    conductor = Conductor(PrefixIndex(4, IngestStats()))
    source = conductor.add_source("a", "", "", 0, False)

    for i in range(1000, 5000):
        assert source.store(0, 0, "GPU", [i], [i, 0, 0, 0], 7, 0) == "parked"
    source.store(0, 0, "GPU", [7], [9, 9, 9, 9], None, 0)
    assert conductor.stats()["waiting"] <= 4
    assert conductor.match_tokens([9, 9, 9, 9, 4999, 0, 0, 0])["a"]["GPU"] == 8
    source.remove(0, 0, None, range(1000, 1100), 0)
    conductor.verify()
