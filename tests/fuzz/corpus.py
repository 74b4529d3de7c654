"""Writes starting corpora for the fuzz targets: python tests/fuzz/corpus.py FOLDER"""

from __future__ import annotations

import json
import lzma
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
BLOCK_SIZES = (1, 4, 16, 64)  # as in fuzz_index.cpp
LIFE_BYTES = 8192  # longer ones are mutated too slowly
BODIES = (
    b'{"t":[1,2,3,4294967295],"m":"a","n":null,"h":[-1,18446744073709551615]}',
    b'{"h":[],"t":[],"x":{"a":[1,{"b":null}]},"m":"\\u00e9\\ud83d\\ude00"}',
    b'{"n":-12.5e+3,"m":true,"t":[' + b",".join(b"%d" % (7919 * i) for i in range(300)) + b"]}",
    b'{"h":[' + b", ".join(b"%d" % (i << 55) for i in range(100)) + b"]}",
    b' { "t" : [ 1 , 2 ] } ',
)
# Answers of engines and beginnings of event streams, in the input format of fuzz_framing.cpp.
ANSWERS = (
    b"\x06\0HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: a, close\r\n\r\nhello and more",
    b"\x02\0HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
    b"9;x=y\r\ndata: 1\n\n\r\n5\r\nhello\r\n0\r\nx: trailer\r\n\r\n",
    b"\0\0HTTP/1.0 204 No Content\r\n\r\n",
    b"\x20\0HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\nto the end",
    b"\0\1: hello\r\n\r\nevent: x\n\ndata: {}\r\n\r\ndata: 2\n\n",
)
MESSAGES = (
    b' [ {"role":"user","content":"a, \\"b\\" ]"} , {"role":"assistant","content":[1,[2]]} ] ',
    b'["\\\\",1,null,{"a":{"b":[]}}]',
)
# Bytes of publishers, in the input format of fuzz_zmtp.cpp.
GREETING = b"\xff" + bytes(8) + b"\x7f\3\1NULL" + bytes(48)
SPEECHES = (
    b"\x07\0"
    + GREETING
    + b"\4\x19\5READY\x0bSocket-Type\0\0\0\3PUB\1\1a\1\x08"
    + bytes(8)
    + b"\0\1x",
    b"\x03\1\1\2kv\4\x0a\4PING\0\1abc\3"
    + bytes(7)
    + b"\x08"
    + bytes(8)
    + b"\2"
    + bytes(7)
    + b"\5hello",
    b"\0\0" + GREETING + b"\4\x0a\5ERROR\x03400",
)
# Numbers and texts at which msgpack changes to another form.
EDGES = (
    json.dumps([2**bits + by for bits in (7, 8, 16, 32, 64) for by in (-1, 0)]).encode(),
    json.dumps([-1, -(2**63), -(2**63) - 1, 5e-324, 1e308]).encode(),
    b"[-0,-0.0,1e400,-1e400,1e-400,-1e-400]",
    json.dumps({"a" * length: "b" * length for length in (31, 32, 255, 256)}).encode(),
    b"[" * 64 + b"]" * 64,
    b"[" * 65 + b"]" * 65,
)


def payloads() -> Iterator[bytes]:
    for line in (TESTS / "support/data/engine_batches.jsonl").read_text().splitlines():
        yield bytes.fromhex(json.loads(line)["payload"])


def lives() -> Iterator[bytes]:
    """Yields the last messages of every recording, with steps of the other kinds added."""
    for path in sorted((TESTS / "captures/recordings").glob("*.json.xz")):
        recording = json.loads(lzma.decompress(path.read_bytes()))
        life = bytes([BLOCK_SIZES.index(recording["block_size"])])
        for number, (_, _, _, payload) in enumerate(recording["messages"][-40:]):
            piece = bytes.fromhex(payload)
            if len(life) + len(piece) < LIFE_BYTES:
                life += step(number % 4, piece) + step(4 + number % 4, bytes(number % 3))
        yield life


def noise(length: int = 400) -> Iterator[bytes]:
    for seed in range(20):
        yield random.Random(seed).randbytes(length)


def texts() -> Iterator[bytes]:
    """Yields JSON texts, each whole and in pieces of 1 and 5 bytes."""
    for body in (*BODIES, *EDGES):
        yield b"\0" + body
        yield b"\2\0\4" + body


def step(kind: int, payload: bytes) -> bytes:
    return struct.pack("<BH", kind, len(payload)) + payload


def write(folder: Path, inputs: Iterator[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(inputs):
        (folder / f"start-{number}").write_bytes(data)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    write(root / "decoder", payloads())
    write(root / "scan", iter(BODIES))
    write(root / "repack", texts())
    write(root / "index", lives())
    write(root / "trie", noise())
    write(root / "ledger", noise())
    write(root / "conductor", noise(2000))
    write(root / "framing", iter(ANSWERS))
    write(root / "messages", iter(MESSAGES))
    write(root / "zmtp", iter(SPEECHES))
