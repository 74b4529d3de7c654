"""A publisher's stream over real sockets: with losses, joined late, restarted, unregistered.

The rules are the indexer's (tests/component/net, tests/unit/wire); here they are tested as a router
sees them, in rows and in `/services`.
"""

from __future__ import annotations

import json
import threading
from itertools import count, pairwise
from typing import Any

import pytest

from kvd_core.base.hashing import local_hashes, sequence_hashes
from tests.conformance.engine import Engine
from tests.support.publishing import Json, Running

PROMPT = list(range(1, 17))
HASHES = sequence_hashes(local_hashes(PROMPT, 4))
QUERY: Json = {"model": "m", "block_size": 4, "token_ids": PROMPT}


def publish(
    engine: Engine, seq: int, *blocks: int, event_id: int | None = None, **how: Any
) -> None:
    """Publishes, as message `seq`, that the engine has stored these blocks of the prompt."""
    event = {
        "event_id": seq if event_id is None else event_id,
        "event_type": "stored",
        "tenant_id": "default",
        "backend_id": "w",
        "medium": "gpu",
        "seq_hashes": [HASHES[block] for block in blocks],
        "base_block_idx": blocks[0],
    }
    engine.publish({"seq": seq, "batch": [0.5, [event]]} | how)


def matched(tokens: int) -> Json:
    return {"longest_matched": tokens, "GPU": tokens}


@pytest.mark.parametrize("first", [0, 1])
def test_a_publisher_that_restarts_begins_with_nothing(conductor: Running, first: int) -> None:
    """At the same address, with messages and events numbered anew, from 0 or from 1."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    for seq, blocks in enumerate(((0, 1), (2,), (3,)), first):
        publish(engine, seq, *blocks)
    conductor.until_row("/query", QUERY, matched(16))
    engine.unbind()
    engine.bind()
    publish(engine, first, 0)
    conductor.until_row("/query", QUERY, matched(4))
    publish(engine, first + 1, 1)
    conductor.until_row("/query", QUERY, matched(8))
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=first + 1)
    assert (shown["restarts"], shown["stale"]) == (1, 0)
    assert shown["blocks"] == 2


def test_a_gap_is_replayed(conductor: Running) -> None:
    engine = conductor.engine(replay=True)
    conductor.register(engine.endpoint("pub"), replay_endpoint=engine.endpoint("replay"))
    publish(engine, 0, 0)
    conductor.until_shown(engine.endpoint("pub"), last_seq=0, stream="exact")
    publish(engine, 1, 1, drop=True)
    publish(engine, 2, 2, drop=True)
    publish(engine, 3, 3)
    conductor.until_row("/query", QUERY, matched(16))
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=3, stream="exact")
    assert (shown["gaps"], shown["event_id_gaps"]) == (1, 0)
    assert "loss" not in shown


def test_a_gap_that_nobody_replays_is_shown(conductor: Running) -> None:
    """Known blocks stay: removals may be lost, but every block was cached at some time."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    publish(engine, 0, 0, 1)
    publish(engine, 2, 2, event_id=5)
    conductor.until_row("/query", QUERY, matched(12))
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=2, stream="degraded")
    assert (shown["status"], shown["gaps"], shown["event_id_gaps"]) == ("active", 1, 1)
    assert "1" in shown["loss"]


@pytest.mark.parametrize("replay", [True, False], ids=["with replay", "without"])
def test_whoever_joins_late_asks_for_the_beginning(conductor: Running, replay: bool) -> None:
    engine = conductor.engine(replay=replay)
    for seq in range(3):
        publish(engine, seq, seq, drop=True)
    more = {"replay_endpoint": engine.endpoint("replay")} if replay else {}
    conductor.register(engine.endpoint("pub"), **more)
    conductor.until_shown(engine.endpoint("pub"), status="active", stream="recovering")
    publish(engine, 3, 3)
    state = "exact" if replay else "degraded"
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=3, stream=state)
    assert ("loss" in shown) is not replay
    found = conductor.post("/query", QUERY)["default"]["a"]
    assert found["longest_matched"] == (16 if replay else 0)


def test_a_publisher_that_is_not_up_yet_is_pending(conductor: Running) -> None:
    engine = conductor.engine()
    engine.unbind()
    conductor.register(engine.endpoint("pub"))
    shown = conductor.until_shown(engine.endpoint("pub"), status="pending", stream="recovering")
    assert shown["last_seq"] is None
    engine.bind()
    conductor.until_shown(engine.endpoint("pub"), status="active", last_error=None)
    publish(engine, 0, 0)
    conductor.until_row("/query", QUERY, matched(4))


def test_publishers_come_and_go_while_messages_flow(conductor: Running) -> None:
    """No message under way, and none that comes later, brings an unregistered publisher back."""
    engine = conductor.engine()
    endpoint = engine.endpoint("pub")
    flowing, numbers = threading.Event(), count()

    def flow() -> None:
        while not flowing.is_set():
            publish(engine, next(numbers), 0, 1, 2, 3, nowait=True)

    talker = threading.Thread(target=flow)
    talker.start()
    try:
        for _ in range(5):
            conductor.register(endpoint)
            conductor.register(endpoint, instance_id="b")
            conductor.until_row("/query", QUERY, matched(16))
            conductor.post("/unregister", {"instance_id": "a"})
            assert conductor.post("/query", QUERY)["default"].keys() == {"b"}
            conductor.post("/unregister", {"instance_id": "b"})
            assert conductor.post("/query", QUERY) == {"default": {}}
    finally:
        flowing.set()
        talker.join()
    assert conductor.services() == []


def test_a_relay_that_repeats_low_numbers_has_not_begun_anew(conductor: Running) -> None:
    """An event that repeats both number and content counts as a duplicate, not as a restart."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    for seq in range(20):
        publish(engine, seq, min(seq, 3))
    for seq in range(20, 24):
        publish(engine, seq, min(seq - 20, 3), event_id=seq - 20)
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=23)
    assert (shown["restarts"], shown["stale"], shown["blocks"]) == (0, 4, 4)
    for seq in range(24, 27):
        publish(engine, seq, 0, event_id=seq - 24)
    conductor.until_row("/query", QUERY, matched(4))
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=26)
    assert (shown["restarts"], shown["blocks"]) == (1, 1)


def test_blocks_that_no_question_finds_are_shown(conductor: Running) -> None:
    """A publisher whose adapter, salt or hashes differ is heard, but no query matches it."""
    for salt in ("w8a8", ""):
        engine = conductor.engine()
        conductor.register(engine.endpoint("pub"), additionalsalt=salt)
        publish(engine, 0, 0, 1)
        conductor.until_shown(engine.endpoint("pub"), last_seq=0)
    conductor.until_row("/query", QUERY | {"cache_salt": "w8a8"}, matched(8))
    found, silent = conductor.services()
    assert (found["blocks"], found["waiting"], found["matched"] > 0) == (2, 0, True)
    assert "warning" not in found
    assert (silent["blocks"], silent["waiting"], silent["matched"]) == (2, 2, 0)
    assert silent["asked"] == found["asked"] > 0
    assert silent["warning"] == "2 blocks are indexed, but no query has matched one"
    metrics = conductor.client.get("/metrics").text
    assert "\nkvd_conductor_unmatched_publishers 1\n" in metrics
    assert '\nkvd_conductor_blocks{state="waiting"} 2\n' in metrics
    conductor.post("/query", QUERY)
    assert all("warning" not in each for each in conductor.services())


@pytest.mark.parametrize(
    ("member", "reason"), [("tenant_id", "tenant_id"), ("model_name", "model_name")]
)
def test_a_publisher_of_others_events_is_told_of(
    conductor: Running, member: str, reason: str
) -> None:
    """`/services` warns of it, and so does one line of the log."""
    engine = conductor.engine()
    instance = f"misregistered-{member}"
    conductor.register(engine.endpoint("pub"), instance_id=instance)
    event = {"event_type": "stored", "seq_hashes": HASHES[:1], "base_block_idx": 0, member: "other"}
    for seq in range(15):
        engine.publish({"seq": seq, "batch": [0.5, [event]]})
    assert "warning" not in conductor.until_shown(engine.endpoint("pub"), last_seq=14)
    engine.publish({"seq": 15, "batch": [0.5, [event]]})
    why = f"16 events stored nothing: they were foreign or ignored ({reason} 16)"
    conductor.until_shown(engine.endpoint("pub"), last_seq=15, warning=why)

    def warnings() -> int:
        lines = conductor.server.stderr.splitlines()
        return sum("publisher_without_effect" in each and instance in each for each in lines)

    conductor.server.wait_until(lambda: warnings() > 0, "the line")
    for seq in range(16, 20):
        engine.publish({"seq": seq, "batch": [0.5, [event]]})
    conductor.until_shown(engine.endpoint("pub"), last_seq=19)
    assert warnings() == 1


def test_a_publisher_of_other_block_sizes_is_told_of(conductor: Running) -> None:
    """The engine begins with a clear, and is registered with another block size."""
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"), instance_id="misregistered-size")
    engine.publish({"seq": 0, "batch": [0.5, [["AllBlocksCleared"]]]})
    for seq in range(1, 17):
        stored = ["BlockStored", [seq], None, PROMPT[:8], 8, None, "GPU"]
        engine.publish({"seq": seq, "batch": [0.5, [stored]]})
    why = "17 events stored nothing: they were foreign or ignored (block_size 16)"
    conductor.until_shown(engine.endpoint("pub"), last_seq=16, warning=why)
    line = 'misregistered-size|default|0:vllm" why='
    conductor.server.wait_until(lambda: line in conductor.server.stderr, "the line")


def test_listings_are_json(conductor: Running) -> None:
    """Members that kvd does not use itself come back as they were given."""
    profile = {"name": "vllm_v1", "numbers": [1, 2.5, None, True]}
    conductor.register("tcp://127.0.0.1:1", hash_profile=profile, cache_group=None)
    (shown,) = conductor.services()
    assert shown["hash_profile"] == profile
    assert "cache_group" not in shown
    view = json.loads(conductor.client.get("/global_view").text)
    assert view["model_contexts"] == [
        {"model_name": "m", "lora_name": "", "block_size": 4, "additional_salt": "",
         "tenant_id": "default", "instance_id": "a"},
    ]  # fmt: skip


# ---- long prompts in JSON

JSON_BYTES = 2 * 1024 * 1024
LONG = [100_000 + token % 50_000 for token in range(200_000)]
LONG_QUERY: Json = {"model": "m", "block_size": 4, "token_ids": LONG}


def long_event(first: int, end: int, standard: bool) -> Json:
    """Returns an event that stores blocks of LONG."""
    names, tokens = list(range(first + 1, end + 1)), LONG[first * 4 : end * 4]
    parent = first or None
    if standard:
        return {"event_type": "stored", "medium": "gpu", "seq_hashes": names,
                "token_ids": tokens, "parent_hash": parent}  # fmt: skip
    return {"type": "BlockStored", "block_hashes": names, "token_ids": tokens, "block_size": 4,
            "parent_block_hash": parent, "medium": "GPU"}  # fmt: skip


@pytest.mark.parametrize("standard", [True, False])
def test_json_of_a_long_prompt_is_applied_whole(conductor: Running, standard: bool) -> None:
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    blocks = len(LONG) // 4
    cuts = (0, blocks // 2, blocks) if standard else (0, blocks)
    events = [long_event(*cut, standard) for cut in pairwise(cuts)]
    payload = json.dumps([0.5, events]).encode()
    payload += b" " * (JSON_BYTES - len(payload))
    engine.publish({"seq": 0, "payload_hex": payload.hex()})
    conductor.until_row("/query", LONG_QUERY, matched(len(LONG)))
    shown = conductor.until_shown(engine.endpoint("pub"), last_seq=0, stream="exact")
    assert (shown["blocks"], shown["events"], shown["bad"]) == (blocks, len(events), {})


def test_longer_json_is_refused_and_said(conductor: Running) -> None:
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    publish(engine, 0, 0)
    payload = json.dumps([0.5, [long_event(0, 8, True)]]).encode()
    payload += b" " * (JSON_BYTES + 1 - len(payload))
    engine.publish({"seq": 1, "payload_hex": payload.hex()})
    loss = "batch 1 could not be decoded"
    shown = conductor.until_shown(engine.endpoint("pub"), stream="degraded", loss=loss)
    assert (shown["bad"], shown["bad_events"], shown["blocks"]) == ({"too_large": 1}, 1, 1)
    publish(engine, 2, 1)
    conductor.until_row("/query", QUERY, matched(8))


# ---- publishers without effect


@pytest.mark.parametrize(
    ("event", "loss"),
    [
        ({"tenant_id": "other"}, "all events were foreign or ignored: tenant_id 1"),
        ({"medium": "dp"}, "all events were ignored: media 1"),
        (
            ["BlockStored", [1, 2], None, PROMPT, 8, None, "GPU"],
            "all events were foreign or ignored: block_size 1",
        ),
    ],
)
def test_a_publisher_without_effect_is_not_exact(conductor: Running, event: Any, loss: str) -> None:
    engine = conductor.engine()
    conductor.register(engine.endpoint("pub"))
    usual = {"event_type": "stored", "medium": "gpu", "seq_hashes": HASHES[:1]}
    first = usual | event if isinstance(event, dict) else event
    engine.publish({"seq": 0, "batch": [0.5, [first]]})
    conductor.until_shown(engine.endpoint("pub"), stream="degraded", loss=loss)
    engine.publish({"seq": 1, "batch": [0.5, [usual]]})
    shown = conductor.until_shown(engine.endpoint("pub"), stream="exact")
    assert "loss" not in shown
    # A new process at the same address is judged anew.
    engine.unbind()
    engine.bind()
    engine.publish({"seq": 0, "batch": [1.5, [first]]})
    conductor.until_shown(engine.endpoint("pub"), stream="degraded", loss=loss, restarts=1)
