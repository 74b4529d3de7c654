"""Known beginnings of conversations against a plain dictionary."""

from __future__ import annotations

import json
from array import array
from random import Random

import pytest

from kvd_core.base.hashing import sequence_hashes
from kvd_core.prompts.conversations import (
    Conversations,
    Recalled,
    Strands,
    data_bytes,
    has_media,
)

ROOM = 1 << 20
ENTRY, STRAND = 64, 40  # bytes of one, without hashes


def hashes(*numbers: int) -> bytes:
    return array("Q", numbers).tobytes()


def recalled(numbers: list[int], tokens: int, rest: int) -> Recalled:
    return Recalled(hashes(*numbers), hashes(*sequence_hashes(numbers)), tokens, rest)


def packed(messages: list[object], blanks: str = "") -> bytes:
    each = (f"{blanks}," + blanks).join(json.dumps(message) for message in messages)
    return f"[{blanks}{each}{blanks}]".encode()


def test_the_longest_known_beginning_is_found() -> None:
    kept = Conversations(ROOM)
    messages = [{"role": "user", "content": text} for text in ("a", 'b ",]} \\', "c", "d")]
    assert kept.recall(b"m", packed(messages)) is None
    assert kept.remember(b"m", packed(messages[:1]), hashes(1), 20)
    assert kept.remember(b"m", packed(messages[:2]), hashes(1, 2), 40)
    assert kept.recall(b"m", packed(messages[:1])) == recalled([1], 20, 1)
    rest = len(packed(messages)) - len(packed(messages[:2])) + 1
    assert kept.recall(b"m", packed(messages)) == recalled([1, 2], 40, rest)
    assert kept.recall(b"n", packed(messages)) is None  # as for another model, or other tools
    assert kept.recall(b"m", packed(messages[1:])) is None
    assert len(kept) == 2


@pytest.mark.parametrize("blanks", ["", " ", "\n\t "])
def test_blanks_between_messages_change_nothing(blanks: str) -> None:
    kept = Conversations(ROOM)
    messages: list[object] = [{"a": [1, {"b": "]"}]}, "text", 7, None, [[]]]
    assert kept.remember(b"", packed(messages), hashes(), 5)
    found = kept.recall(b"", packed([*messages, "more"], blanks))
    assert found is not None
    assert found.tokens == 5


@pytest.mark.parametrize("messages", [b"[]", b"[ ]", b"{}", b"7", b""])
def test_without_messages_nothing_is_kept(messages: bytes) -> None:
    kept = Conversations(ROOM)
    assert not kept.remember(b"", messages, hashes(1), 16)
    assert kept.recall(b"", messages) is None


def test_the_longest_unused_make_room() -> None:
    kept = Conversations(3 * (ENTRY + 80))
    prompts = [packed([number]) for number in range(4)]
    ten = hashes(*range(10))
    for each in prompts[:3]:
        assert kept.remember(b"", each, ten, 160)
    assert kept.recall(b"", prompts[0]) is not None
    assert kept.remember(b"", prompts[3], ten, 160)
    assert [kept.recall(b"", each) is not None for each in prompts] == [True, False, True, True]
    assert (len(kept), kept.forgotten) == (3, 1)
    assert not kept.remember(b"", packed(["long"]), hashes(*range(100)), 1600)
    assert len(kept) == 3


def test_a_conversation_is_kept_once() -> None:
    kept = Conversations(ROOM)
    for blocks in (3, 1, 2):
        assert kept.remember(b"", b"[1]", hashes(*range(blocks)), blocks)
    assert len(kept) == 1
    assert kept.size_bytes == ENTRY + 16
    assert kept.recall(b"", b"[1,2]") == recalled([0, 1], 2, 3)


def test_against_a_dictionary() -> None:
    random = Random(3)
    kept, model = Conversations(ROOM), {}
    texts = ["", "x", '"', "\\", "{[,", "é" * 9, "long " * 50]
    for step in range(2000):
        messages = [random.choice(texts) for _ in range(random.randint(1, 5))]
        context = random.choice([b"", b"tools"])
        if random.random() < 0.3:
            kept.remember(context, packed(list(messages)), hashes(step), step)
            model[context, tuple(messages)] = step
        known = [n for n in range(1, len(messages) + 1) if (context, tuple(messages[:n])) in model]
        found = kept.recall(context, packed(list(messages)))
        if not known:
            assert found is None
        else:
            step_of = model[context, tuple(messages[: known[-1]])]
            assert found is not None
            assert (found.local_hashes, found.tokens) == (hashes(step_of), step_of)


def test_a_thread_goes_on_from_its_longest_beginning() -> None:
    strands = Strands(ROOM)
    first = strands.strand_of(b"m", packed(["a"]))
    assert first is not None
    assert strands.strand_of(b"m", packed(["a"])) == first
    assert strands.strand_of(b"m", packed(["a", "b", "c"])) == first
    assert strands.strand_of(b"m", packed(["a", "b", "c", "d"])) == first
    others = {strands.strand_of(*each) for each in ((b"n", packed(["a"])), (b"m", packed(["b"])))}
    assert len({first, *others}) == 3
    assert len(strands) == 5
    assert strands.strand_of(b"m", b"[]") is None


def test_threads_make_room() -> None:
    strands = Strands(2 * STRAND)
    begun = [strands.strand_of(b"", packed([number])) for number in range(3)]
    assert (len(strands), strands.forgotten) == (2, 1)
    assert strands.strand_of(b"", packed([2, "more"])) == begun[2]
    assert strands.strand_of(b"", packed([1, "more"])) != begun[1]  # it was forgotten
    assert Strands(0).strand_of(b"", packed([1])) == begun[1]  # depends on the text alone


def test_parts_that_are_no_text_are_seen() -> None:
    """Only by their names, which no text can contain, as its quotes are escaped."""
    for name in ("image_url", "image", "input_audio", "audio_url", "video_url", "input_image"):
        assert has_media(packed([{"role": "user", "content": [{"type": name, name: {"a": 1}}]}]))
        content = f'{{"type": "{name}"}} image_url "image'
        assert not has_media(packed([{"role": "user", "content": content}]))
    for unfinished in (b"", b'"', b'[{"a":"\\"image_url\\"'):
        assert not has_media(unfinished)


def test_the_data_of_an_image_is_no_text() -> None:
    data, text = "a" * 5000, "word " * 1000
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    assert data_bytes(packed([text, {"content": [{"type": "text", "text": text}]}])) == 0
    assert data_bytes(packed([text, {"content": [image, image]}])) == 2 * (5000 + 22)
    assert data_bytes(b'"' + data.encode()) == 5000
