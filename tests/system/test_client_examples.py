"""The programs of examples/client in front of a running kvd and an engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from examples.client.ask_the_indexer import ask
from examples.client.loads_in_a_script import main
from examples.client.reserve_around_a_request import complete
from examples.engine.options import EngineOptions
from kvd.client import Client
from tests.support.asking import Faces, serving_faces
from tests.support.engines import BLOCK_SIZE, Engine
from tests.support.gateways import engines

TOKENS = list(range(1, 18))
TEST_SECONDS = 60


@pytest.fixture(scope="module")
def kvd(tmp_path_factory: pytest.TempPathFactory, certificate: Path) -> Iterator[Faces]:
    with serving_faces(tmp_path_factory.mktemp("examples"), certificate) as faces:
        yield faces


def url(kvd: Faces, face: str) -> str:
    return f"http://{kvd.plain(face)}"


async def test_ask_the_indexer(kvd: Faces, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine()
    indexer = url(kvd, "indexer")
    try:
        with trio.fail_after(TEST_SECONDS), Client(indexer=indexer) as client:
            await ask(indexer, "m", TOKENS)
            assert "no indexer for model=m" in capsys.readouterr().out
            client.indexer.register("m", 7, engine.endpoint, block_size=BLOCK_SIZE)
            await ask(indexer, "m", TOKENS)
            assert capsys.readouterr().out == "no worker has cached anything yet\n"
            await trio.to_thread.run_sync(engine.subscribed.wait)
            engine.store(TOKENS)
            while 7 not in client.indexer.query("m", TOKENS).scores:  # noqa: ASYNC110
                await trio.sleep(0.01)
            await ask(indexer, "m", TOKENS)
            assert capsys.readouterr().out == "worker 7 can reuse 16 tokens\n"
            client.indexer.unregister("m", 7)
    finally:
        engine.close()


async def test_ask_an_indexer_whose_workers_another_face_has(
    kvd: Faces, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine()
    try:
        with trio.fail_after(TEST_SECONDS), Client(selection=url(kvd, "selection")) as client:
            client.selection.put_worker(
                5,
                model_name="o",
                endpoint="http://127.0.0.1:1",
                block_size=BLOCK_SIZE,
                kv_events_endpoint=engine.endpoint,
            )
            await ask(url(kvd, "indexer"), "o", TOKENS)
            assert "no indexer" not in capsys.readouterr().out
            client.selection.remove_worker(5)
    finally:
        engine.close()


async def test_reserve_around_a_request(kvd: Faces, capsys: pytest.CaptureFixture[str]) -> None:
    selection = url(kvd, "selection")
    with trio.fail_after(TEST_SECONDS), Client(selection=selection) as client:
        async with engines(EngineOptions(model="e")) as (engine,):
            client.selection.put_worker(
                3,
                model_name="e",
                endpoint=engine.url,
                block_size=16,
                without_kv_events=True,
            )
            await complete(selection, "e", TOKENS)
        first, *text, last = capsys.readouterr().out.splitlines()
        assert first == f"worker 3 rank 0 at {engine.url}"
        assert "".join(text)
        assert last == "freed: True"
        (loads,) = client.selection.loads(model_name="e")
        assert [rank.active_requests for rank in loads.loads] == [0]
        client.selection.remove_worker(3)


def test_loads_in_a_script(kvd: Faces, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (socket,) = (each for each in kvd.addresses["selection"] if each.startswith("unix:"))
    with Client(selection=socket) as client:
        client.selection.put_worker(
            4, model_name="s", endpoint="http://h:1", block_size=4, without_kv_events=True
        )
        with client.reserve(model_name="s", token_ids=TOKENS):
            assert main(socket) == 0
        client.selection.remove_worker(4)
    assert capsys.readouterr().out == (
        "s: worker 4 rank 0 has 1 requests, 17 tokens to prefill and 4 blocks in use\n"
    )
    (tmp_path / "token").write_text("t" * 16)
    assert main("http://127.0.0.1:1", str(tmp_path / "token")) == 1
    assert "GET /loads: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["ask_the_indexer", "loads_in_a_script", "reserve_around_a_request"]
)
def test_without_arguments_they_say_what_they_take(name: str) -> None:
    command = [sys.executable, "-m", f"examples.client.{name}"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TEST_SECONDS)
    assert result.returncode == 1 and f"python -m examples.client.{name} " in result.stderr
    assert "Traceback" not in result.stderr
