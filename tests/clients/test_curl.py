"""curl in front of the gateway."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from examples.engine.options import EngineOptions
from tests.clients.common import Start, base_url, work
from tests.support.gateways import serving

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


async def curl(*args: str) -> str:
    command = ["curl", "-sS", "--noproxy", "*", "--max-time", "30", *args]
    done = await work(subprocess.run, command, capture_output=True, text=True, check=True)
    return done.stdout.replace("\r\n", "\n")


async def test_curl(kvd_process: Start, tmp_path: Path) -> None:
    async with serving(kvd_process, EngineOptions()) as (client, running):
        url = base_url(client)
        chat = {"model": "demo", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}
        said = await curl("-i", f"{url}/v1/chat/completions", "-d", json.dumps(chat))
        assert said.startswith("HTTP/1.1 200 OK\n")
        assert f"x-kvd-endpoint: {running[0].url}\n" in said

        streamed = json.dumps({**chat, "stream": True})
        said = await curl("-N", f"{url}/v1/chat/completions", "-d", streamed)
        assert said.endswith("data: [DONE]\n\n")

        long = tmp_path / "long.json"  # so long that it waits for 100 Continue
        long.write_text(json.dumps({**chat, "user": "x" * 2**21}))
        for more in ((), ("-H", "transfer-encoding: chunked")):
            where = f"{url}/v1/chat/completions"
            said = await curl("-i", where, "-H", "expect: 100-continue", *more, "-d", f"@{long}")
            assert said.startswith("HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\n")
            assert len(running[0].server.received[0]) == long.stat().st_size

        (tmp_path / "a.wav").write_bytes(b"RIFF" + bytes(100_000))
        form = ("-F", f"file=@{tmp_path}/a.wav", "-F", "model=demo")
        assert "bytes" in json.loads(await curl(f"{url}/v1/audio/transcriptions", *form))["text"]

        assert (await curl("-I", f"{url}/v1/models")).startswith("HTTP/1.1 200 OK\n")
        assert (await curl("-I", url)).startswith("HTTP/1.1 404 ")
