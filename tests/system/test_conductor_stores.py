"""Stores like real pools: a master's message numbers, SGLang's names, blocks located by depth."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.app.index_full_log import WAITING as WAITING_BOUND
from kvd_core.base.hashing import local_hashes, sequence_hashes
from tests.conformance.engine import Engine
from tests.support.publishing import Json, Running

PROMPT = list(range(1, 17))
HASHES = sequence_hashes(local_hashes(PROMPT, 4))
QUERY: Json = {"model": "m", "block_size": 4, "token_ids": PROMPT}


def publish(engine: Engine, seq: int, kind: str = "stored", **members: Any) -> None:
    """Publishes one event as mooncake_master does, numbered like its message."""
    event = {"event_id": seq, "event_type": kind, "tenant_id": "default", "backend_id": "pool",
             "medium": "cpu", "seq_hashes": [], "base_block_idx": 0}  # fmt: skip
    engine.publish({"seq": seq, "batch": [0.5, [event | members], 0]})


def matched(tokens: int) -> Json:
    return {"longest_matched": tokens, "CPU": tokens}


# ---- SGLang's objects

# The hash of a page, whose first 64 bits SGLang publishes as a signed number.
PAGE = "fedcba98765432100123456789abcdef" * 2
NAMED = int(PAGE[:16], 16) - 2**64


@pytest.mark.parametrize("name", ["", "meta-llama-Llama-3.1-8B_", "blue_Qwen-Qwen3_v2_"])
def test_objects_of_sglang_are_its_blocks(conductor: Running, name: str) -> None:
    """A model's name, perhaps with a tag before it, precedes the hash; sidecars are no blocks."""
    engine, pool = conductor.engine(), conductor.engine()
    conductor.register(engine.endpoint("pub"), type="SGLang")
    conductor.register(pool.endpoint("pub"), type="Mooncake")
    stored = ["BlockStored", [NAMED], None, PROMPT[:4], 4, None, "GPU"]
    engine.publish({"seq": 0, "batch": [0.5, [stored]]})
    for seq, suffix in enumerate(("0_draft_k", "0_swa_k", "_indexer", "0_k", "0_v"), 1):
        publish(pool, seq, object_key=f"{name}{PAGE}_{suffix}")
    conductor.until_row("/query", QUERY, {"GPU": 4, "CPU": 4})
    for seq, suffix in enumerate(("0_draft_k", "0_swa_k", "_indexer"), 6):
        publish(pool, seq, "removed", object_key=f"{name}{PAGE}_{suffix}")
    shown = conductor.until_shown(pool.endpoint("pub"), last_seq=8)
    assert (shown["blocks"], shown["ignored"], shown["bad"]) == (1, {"object_key": 3}, {})
    assert conductor.post("/query", QUERY)["default"]["a"]["CPU"] == 4
    publish(pool, 9, "removed", object_key=f"{name}{PAGE}_0_v")
    conductor.until_row("/query", QUERY, {"GPU": 4, "CPU": 0})


# ---- blocks located by depth


def test_blocks_with_tokens_and_depth_alone_count(conductor: Running) -> None:
    """Blocks may come before or after the one they follow; with no parent, none conflicts."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    publish(engine, 0, seq_hashes=HASHES[2:], token_ids=PROMPT[8:], base_block_idx=2)
    publish(engine, 1, seq_hashes=HASHES[:1], token_ids=PROMPT[:4])
    conductor.until_row("/query", QUERY, matched(4))
    publish(engine, 2, seq_hashes=HASHES[1:2], token_ids=PROMPT[4:8], base_block_idx=1)
    conductor.until_row("/query", QUERY, matched(16))
    by_hash = {"model": "m", "block_size": 4, "seq_hashes": HASHES}
    conductor.until_row("/query_by_hash", by_hash, matched(16))
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=2)
    assert (shown["unlocated"], shown["conflicts"], shown["orphans"]) == (0, 0, 1)


def test_a_depth_that_contradicts_the_parent_is_counted(conductor: Running) -> None:
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    publish(engine, 0, seq_hashes=HASHES[:1], token_ids=PROMPT[:4])
    publish(engine, 1, seq_hashes=HASHES[1:2], token_ids=PROMPT[4:8], parent_hash=HASHES[0])
    conductor.until_row("/query", QUERY, matched(8))
    assert conductor.until_shown(engine.endpoint("pub"), last_seq=1)["conflicts"] == 1


def test_blocks_of_an_engine_by_depth_are_no_beginning(conductor: Running) -> None:
    """An engine's own hashes do not tell what precedes a block, so its blocks are not found."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    publish(engine, 0, seq_hashes=[7, 8], token_ids=PROMPT[:8], base_block_idx=3)
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=0)
    assert (shown["blocks"], shown["waiting"]) == (2, 2)
    assert conductor.post("/query", QUERY)["default"]["a"]["longest_matched"] == 0


# ---- a master's numbers


def test_a_master_begins_with_1(conductor: Running) -> None:
    """A master has no message 0, so nothing is missing before 1; it has no replay either."""
    pool = conductor.engine()
    conductor.register(pool.endpoint("pub"), type="Mooncake")
    publish(pool, 1, seq_hashes=HASHES[:1])
    shown = conductor.until_shown(pool.endpoint("pub"), last_seq=1, stream="exact")
    assert (shown["gaps"], shown["event_id_gaps"], "loss" in shown) == (0, 0, False)
    publish(pool, 4, seq_hashes=HASHES[1:2])
    shown = conductor.until_shown(pool.endpoint("pub"), last_seq=4, stream="degraded")
    assert (shown["gaps"], shown["loss"]) == (1, "missing 2..3")


@pytest.mark.parametrize(("kind", "first"), [("Mooncake", 2), ("vLLM", 1)])
def test_who_joins_late_has_missed_something(conductor: Running, kind: str, first: int) -> None:
    """Engines begin with 0, stores with 1."""
    publisher = conductor.engine()
    conductor.register(publisher.endpoint("pub"), type=kind)
    publish(publisher, first, seq_hashes=HASHES[:1])
    shown = conductor.until_shown(publisher.endpoint("pub"), last_seq=first, stream="degraded")
    assert (shown["gaps"], shown["loss"]) == (1, f"missing {first - 1}")


def test_a_master_that_is_started_again_begins_with_1(conductor: Running) -> None:
    pool = conductor.engine()
    conductor.register(pool.endpoint("pub"), type="Mooncake")
    publish(pool, 1, seq_hashes=HASHES[:2])
    publish(pool, 2, seq_hashes=HASHES[2:3])
    conductor.until_row("/query", QUERY, matched(12))
    pool.unbind()
    pool.bind()
    publish(pool, 1, seq_hashes=HASHES[:1])
    conductor.until_row("/query", QUERY, matched(4))
    shown = conductor.until_shown(pool.endpoint("pub"), last_seq=1, stream="exact")
    assert (shown["restarts"], shown["gaps"]) == (1, 0)


# ---- hashes without known tokens

WAITING = 1_048_576  # per model, tenant and block size


def test_more_hashes_than_can_wait_are_refused(conductor: Running) -> None:
    """Earlier hashes stay, the beginnings of prompts; the stream says which batch it lacks."""
    pool = conductor.engine()
    conductor.register(pool.endpoint("pub"), type="Mooncake")
    publish(pool, 1, seq_hashes=HASHES)
    conductor.until_row("/query", QUERY, matched(16))  # makes the tokens of its blocks known
    part = 99_000
    messages = -(-WAITING // part)
    for seq in range(2, 2 + messages):
        publish(pool, seq, seq_hashes=list(range(2**40 + seq * part, 2**40 + (seq + 1) * part)))
    loss = f"the index had no room for batch {1 + messages}"
    shown = conductor.until_shown(pool.endpoint("pub"), 60.0, stream="degraded", loss=loss)
    assert (shown["waiting"], shown["ignored"]) == (WAITING, {"full": 1})
    conductor.until_row("/query", QUERY, matched(16))
    log = conductor.server
    line = f'event=index_full bound="{WAITING_BOUND}" blocks=4 '
    log.wait_until(lambda: line in log.stderr, "the line of what finds no room")
