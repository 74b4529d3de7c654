"""With every answer, kvd expects exactly as many cached tokens as vLLM reports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest

from tests.support.ports import find_free_port
from tests.support.processes import Server

VARIABLE = "KVD_VLLM_PYTHON"
pytestmark = pytest.mark.skipif(VARIABLE not in os.environ, reason=f"{VARIABLE} is not set")

BLOCK_SIZE = 32  # tokens; smallest size of vLLM's attention on CPUs
BLOCKS = 256
START_S = 300.0  # an engine compiles at its first start
HEARD_S = 20.0  # events take milliseconds, on a machine that is not busy
WORDS = [f"word{number}" for number in range(300)]


@dataclass
class Vllm:
    """One vLLM server."""

    model: Path
    folder: Path
    number: int
    port: int
    events_port: int
    replays_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        # vLLM binds its publisher only if the address has `::` in it; this one means 127.0.0.1.
        local = "tcp://[::ffff:127.0.0.1]"
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"{local}:{self.events_port}",
            "replay_endpoint": f"{local}:{self.replays_port}",
        }
        environ = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # adds POST /reset_prefix_cache
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.number % (os.cpu_count() or 1)),
            "VLLM_HOST_IP": "127.0.0.1",
        }
        command = [os.environ[VARIABLE], "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", "tiny"]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--enforce-eager"]
        command += ["--max-model-len", "4096", "--max-num-seqs", "16"]
        command += ["--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(BLOCKS)]
        command += ["--enable-prefix-caching", "--enable-prompt-tokens-details"]
        command += ["--kv-events-config", json.dumps(events)]
        with (self.folder / f"vllm-{self.number}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )

    def wait_healthy(self) -> None:
        wait(lambda: get(f"{self.url}/health") == 200, START_S, f"{self.url} is healthy")

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, number)
        self.process.wait()


def get(url: str) -> int:
    try:
        return httpx.get(url, trust_env=False, timeout=5).status_code
    except httpx.TransportError:
        return 0


def wait(condition: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not after {seconds} s: {what}")
        time.sleep(0.02)


def free_ports() -> tuple[int, int, int]:
    return find_free_port(), find_free_port(), find_free_port()


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Vllm]]:
    """Two servers with the same model."""
    folder = tmp_path_factory.mktemp("vllm")
    script = Path(__file__).with_name("make_model.py")
    subprocess.run([os.environ[VARIABLE], str(script), str(folder / "model")], check=True)
    two = [Vllm(folder / "model", folder, number, *free_ports()) for number in range(2)]
    for each in two:
        each.start()
    try:
        for each in two:
            each.wait_healthy()
        yield two
    finally:
        for each in two:
            each.end(signal.SIGKILL)


@pytest.fixture
def gateway_of(
    kvd_process: Callable[..., Server], engines: list[Vllm]
) -> Iterator[Callable[..., Gateway]]:
    """A function that starts a gateway in front of both engines, with these flags."""
    with ExitStack() as opened:

        def start(*flags: str) -> Gateway:
            gateway = Gateway(kvd_process, engines, *flags)
            opened.callback(gateway.http.close)
            return gateway

        yield start


class Gateway:
    """A gateway in front of the engines, whose index can be queried."""

    def __init__(self, start: Callable[..., Server], engines: list[Vllm], *flags: str) -> None:
        index = find_free_port()
        named = [part for each in engines for part in ("--upstream", each.url)]
        flags = (*named, "--indexer-bind", f"127.0.0.1:{index}", *flags)
        # An engine on a busy core tokenizes slowly, and kvd must know the tokens of every prompt.
        flags = (*flags, "--gateway-memory-bytes", "0", "--gateway-tokenize-s", "10")
        self.server = start(*flags, face="gateway")
        self.index = f"http://127.0.0.1:{index}"
        self.http = httpx.Client(base_url=self.server.base_url, trust_env=False, timeout=120)
        self.agreed = self.prompt_tokens = self.cached_tokens = 0
        self.wait_serving(len(engines))

    def wait_serving(self, count: int) -> None:
        def serving() -> bool:
            return bool(self.http.get("/ready").json()["serving"] == count)

        wait(serving, START_S, f"{count} engines serve")

    def worker_ids(self) -> dict[str, str]:
        """Returns the worker ids of the engines, by URL."""
        shown = self.http.get("/status").json()["upstreams"]
        return {each["url"]: str(each["worker_id"]) for each in shown}

    def cached(self, url: str, tokens: list[int]) -> int:
        """Returns how many leading tokens the index says an engine caches."""
        question = {"model_name": "tiny", "token_ids": tokens}
        found = httpx.post(f"{self.index}/query", json=question, trust_env=False).json()
        return int(found.get("instances", {}).get(self.worker_ids()[url], {}).get("gpu", 0))

    def ask(self, path: str, members: dict[str, Any]) -> tuple[httpx.Headers, dict[str, Any]]:
        """Sends a request, compares, and waits until the index has what the engine stored."""
        answered = self.http.post(path, json={"model": "tiny", "max_tokens": 3, **members})
        assert answered.status_code == 200, answered.text
        if members.get("stream"):
            lines = answered.text.split("\n\n")
            assert lines[-2] == "data: [DONE]"
            answer = json.loads(lines[-3].removeprefix("data: "))
        else:
            answer = answered.json()
        usage, headers = answer["usage"], answered.headers
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        assert int(headers["x-kvd-prompt-tokens"]) == usage["prompt_tokens"]
        assert int(headers["x-kvd-matched-tokens"]) == cached
        self.agreed += 1
        self.prompt_tokens += usage["prompt_tokens"]
        self.cached_tokens += cached
        url = headers["x-kvd-endpoint"]
        tokens = self.tokens_of(url, members)
        whole = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        wait(lambda: self.cached(url, tokens) == whole, HEARD_S, f"{url} caches {whole} tokens")
        return headers, answer

    def tokens_of(self, url: str, members: dict[str, Any]) -> list[int]:
        """Returns a prompt's tokens, from an engine itself: the gateway would choose for it."""
        if isinstance(members.get("prompt"), list):
            return list(members["prompt"])
        question = {name: members[name] for name in ("prompt", "messages") if name in members}
        answered = httpx.post(f"{url}/tokenize", json=question, trust_env=False)
        return list(answered.json()["tokens"])


def text(random: Random, words: int) -> str:
    return " ".join(random.choices(WORDS, k=words))


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def converse(gateway: Gateway, random: Random, conversations: int, turns: int) -> None:
    """Holds several conversations, turn by turn, with two system prompts."""
    systems = [{"role": "system", "content": text(random, 40)} for _ in range(2)]
    each = [[random.choice(systems)] for _ in range(conversations)]
    for _ in range(turns):
        for messages in each:
            messages.append(user(text(random, 20)))
            _, answer = gateway.ask("/v1/chat/completions", {"messages": messages})
            messages.append(answer["choices"][0]["message"] | {"content": text(random, 5)})


def test_every_prediction_is_what_the_engine_reports(gateway_of: Callable[..., Gateway]) -> None:
    gateway, random = gateway_of(), Random(1)
    converse(gateway, random, conversations=4, turns=3)
    for _ in range(4):
        prompt = text(random, 60)
        for stream in (False, True):
            more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            gateway.ask("/v1/completions", {"prompt": prompt, **more})
            gateway.ask("/v1/chat/completions", {"messages": [user(prompt)], **more})
        for members in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}, {"echo": True}):
            gateway.ask("/v1/completions", {"prompt": prompt, **members})
        gateway.ask("/v1/chat/completions", {"messages": [user(prompt)], "echo": True})
    for name in ("reasoning", "reasoning_content"):  # vLLM reads both, the latter not to tokenize
        thought = {"role": "assistant", "content": "so", name: text(random, 60)}
        body = {"model": "tiny", "max_tokens": 3, "messages": [user(prompt), thought, user("and?")]}
        answered = gateway.http.post("/v1/chat/completions", json=body)
        counted = int(answered.headers["x-kvd-prompt-tokens"])
        assert counted == answered.json()["usage"]["prompt_tokens"]
    ids = [random.randrange(10, 1000) for _ in range(200)]
    headers, _ = gateway.ask("/v1/completions", {"prompt": ids})
    assert headers["x-kvd-tokens"] == "ids"
    gateway.ask("/v1/completions", {"prompt": ids})
    assert gateway.agreed == 46


def test_a_reset_a_restart_and_an_abort(
    gateway_of: Callable[..., Gateway], engines: list[Vllm]
) -> None:
    gateway, random = gateway_of(), Random(2)
    prompt = {"prompt": text(random, 100)}
    headers, _ = gateway.ask("/v1/completions", prompt)
    url = headers["x-kvd-endpoint"]
    tokens = gateway.tokens_of(url, prompt)
    httpx.post(f"{url}/reset_prefix_cache", trust_env=False)
    another = {"model": "tiny", "prompt": "x", "max_tokens": 1}  # vLLM sends events with a step
    httpx.post(f"{url}/v1/completions", json=another, trust_env=False)
    wait(lambda: gateway.cached(url, tokens) == 0, HEARD_S, "the reset is heard")
    headers, _ = gateway.ask("/v1/completions", prompt)
    headers, _ = gateway.ask("/v1/completions", prompt)
    assert int(headers["x-kvd-matched-tokens"]) > 0

    endless = {"model": "tiny", "max_tokens": 3000, "stream": True, "ignore_eos": True, **prompt}
    with gateway.http.stream("POST", "/v1/completions", json=endless) as response:
        served = next(each for each in engines if each.url == response.headers["x-kvd-endpoint"])
        next(response.iter_raw())
    wait(lambda: running_at(served) == 0, HEARD_S, "the engine has aborted the request")

    served.end(signal.SIGKILL)
    for _ in range(3):  # requests succeed, and none expects the lost cache
        headers, _ = gateway.ask("/v1/completions", prompt)
        assert headers["x-kvd-endpoint"] != served.url
    served.start()
    served.wait_healthy()
    gateway.wait_serving(2)
    wait(lambda: gateway.cached(served.url, tokens) == 0, HEARD_S, "the new process caches nothing")
    converse(gateway, random, conversations=3, turns=2)


def running_at(engine: Vllm) -> float:
    for line in httpx.get(f"{engine.url}/metrics", trust_env=False).text.splitlines():
        if line.startswith("vllm:num_requests_running{"):
            return float(line.rpartition(" ")[2])
    raise AssertionError("vLLM does not say how many requests run")


def test_more_is_cached_than_with_round_robin(gateway_of: Callable[..., Gateway]) -> None:
    shares = []
    for seed, flags in ((3, ()), (4, ("--router-mode", "round-robin"))):
        gateway = gateway_of(*flags)
        converse(gateway, Random(seed), conversations=5, turns=4)
        shares.append(gateway.cached_tokens / gateway.prompt_tokens)
    by_cache, in_turn = shares
    print(f"cached share: {by_cache:.3f} by cache, {in_turn:.3f} round-robin")
    assert by_cache > in_turn
