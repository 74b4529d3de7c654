"""Compares kvd's gateway with other proxies, in one run, in front of the same simulated engines.

    python bench/gateway.py [--peers FOLDER] [NAME ...] [--rounds N]

    direct         no proxy: the limit of engines, generator and machine
    kvd            kvd gateway of this checkout
    nginx          the one in the PATH, with round robin and without buffering
    smg, sglang-router, vllm-router
                   each from a virtual environment of its name in FOLDER (pip install NAME); each
                   policy is a contender of its own

All proxies and engines run at the same time. Each row puts load on one proxy after the other, anew
in every round, so that whatever slows the machine for longer slows all of them. The load consists
of next turns of known conversations (loadgen/chats.hpp), so a gateway that remembers conversations
needs no tokenizer; frames of answers have 200 bytes. Shares of cached tokens come from the engines'
own caches; each workload and round has fresh engines and proxies. CPU is the user and system time
of the proxy's process. Prints Markdown.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from statistics import median

import machine
from errors import BenchError
from generator import Generator, Option, Result, build
from servers import Contender, Server, free_ports, running, running_on

HERE = Path(__file__).resolve().parent
ENGINES = 4
MODEL = "bench"
DIRECT = "direct"
WARM_TIMEOUT = 30.0  # seconds until a proxy has found its engines
SECONDS = 2.0  # of a measured run

NGINX = """daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/nginx.error;
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 16m; client_body_buffer_size 1m;
  keepalive_requests 1000000000;
  upstream engines {{ {servers} keepalive 1024; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""


@dataclass(frozen=True)
class Row:
    """One figure of one load."""

    title: str
    key: str  # of the generator's result
    load: Mapping[str, Option]
    aim: Callable[[float], bool] | None = None
    aims: str = "–"
    beyond_direct: bool = False  # show the difference to the figure without a proxy
    digits: int = 0


FIRST = {"conns": 16, "rate": 200, "secs": SECONDS}
CLOSED = {"conns": 16, "secs": SECONDS}
MANY = {"conns": 1000, "rate": 1000, "warm": 2, "frames": 20000, "pace_us": 50000, "secs": SECONDS}
FAST = {"conns": 64, "frames": 20000, "secs": SECONDS}
LONG = {"body_bytes": 65536}
# The thousand streams come first: a process does not return memory that later rows would grow.
ROWS = (
    Row("RSS at 1,000 streams, MB", "rss_mb", MANY, lambda x: x <= 60, "≤ 60"),
    Row("CPU µs a chunk, 1,000 streams of 20 a second", "frame_cpu_us", MANY, digits=1),
    Row("first data added at 200 requests/s, 2 kB bodies, µs", "first_us", FIRST,
        lambda x: x <= 350, "≤ 350", beyond_direct=True),
    Row("first data added at 200 requests/s, 64 kB, µs", "first_us", {**FIRST, **LONG},
        lambda x: x <= 600, "≤ 600", beyond_direct=True),
    Row("CPU µs a request, 16 connections, 2 kB", "cpu_us", CLOSED, lambda x: x <= 120, "≤ 120"),
    Row("CPU µs a request, 16 connections, 64 kB", "cpu_us", {**CLOSED, **LONG}),
    Row("CPU µs a chunk, 64 streams as fast as possible", "frame_cpu_us", FAST,
        lambda x: x <= 3.5, "≤ 3.5", digits=2),
    Row("chunks/s, 64 streams", "frames_per_s", FAST, lambda x: x >= 300_000, "≥ 300,000"),
)  # fmt: skip


@dataclass(frozen=True)
class Workload:
    """Conversations, and the engines that cache them."""

    title: str
    prompts: int  # system prompts
    cache_blocks: int  # of each engine
    aim: float  # share of cached tokens
    most_busy: float | None = None  # the aim for requests of the busiest engine ÷ the mean

    def load(self) -> dict[str, Option]:
        lengths: dict[str, Option] = {"system_tokens": SYSTEM_TOKENS, "turn_tokens": TURN_TOKENS}
        answers: dict[str, Option] = {"frames": 8, "pace_us": 1000, "conns": 16}
        return {"prompts": self.prompts, "chats": CHATS, "turns": TURNS, **lengths, **answers}


# With these, an unlimited cache has 0.909 of all tokens of the first workload, 0.913 of the last.
CHATS, TURNS, SYSTEM_TOKENS, TURN_TOKENS = 200, 6, 1072, 64
AMPLE = 1 << 20  # blocks of a cache that never evicts any
# Blocks of all conversations with 8 system prompts: the prompts, users' messages, and all answers
# but the last.
WORKING_SET = (8 * SYSTEM_TOKENS + CHATS * (2 * TURNS - 1) * TURN_TOKENS) // 16
WORKLOADS = (
    Workload("8 system prompts", 8, AMPLE, 0.909),
    Workload("8 system prompts, caches of ¾ of the working set", 8,
             WORKING_SET * 3 // 4 // ENGINES, 0.78),
    Workload("one system prompt", 1, AMPLE, 0.91, 1.2),
)  # fmt: skip
PREFILL_US = 20  # for each token that is not cached, in these workloads


@dataclass
class Proxy:
    """A proxy of the comparison, and its results."""

    name: str
    command: Command
    version: str
    results: dict[str, list[float]] = field(default_factory=dict)  # by the row's title


@dataclass(frozen=True)
class Engine:
    """A running simulated engine."""

    server: Server

    @property
    def url(self) -> str:
        return f"http://{self.server.address}"

    def ask(self, method: str, path: str, body: str = "") -> dict[str, object]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=10)
        try:
            connection.request(method, path, body)
            answer: dict[str, object] = json.loads(connection.getresponse().read())
            return answer
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise BenchError(f"an engine does not answer {path}: {error}") from error
        finally:
            connection.close()

    def events(self) -> str:
        sources = self.ask("GET", "/kv_event_sources")
        first = sources["0"]
        assert isinstance(first, dict)
        return str(first["endpoint"])

    def figure(self, name: str) -> int:
        value = self.ask("GET", "/bench/stats")[name]
        assert isinstance(value, int)
        return value


@dataclass(frozen=True)
class Target:
    """Where the generator sends requests, and the process whose CPU it reads (0: none)."""

    address: str
    pid: int


# ---- contenders


# Returns the command that starts a proxy in front of engines, on the first of two ports; the other
# one is for its metrics.
Command = Callable[[Sequence[int], "Sequence[Engine]"], tuple[str, ...]]


def kvd(ports: Sequence[int], engines: Sequence[Engine]) -> tuple[str, ...]:
    off = ("--indexer-bind", "--slot-tracker-bind", "--selection-bind", "--conductor-bind")
    command = [sys.executable, "-m", "kvd", "gateway", "--port", str(ports[0])]
    for flag in off:
        command += [flag, "off"]
    for engine in engines:
        command += ["--upstream", engine.url]
    return tuple(command)


def nginx(folder: Path) -> Command:
    def command(ports: Sequence[int], engines: Sequence[Engine]) -> tuple[str, ...]:
        servers = " ".join(f"server {engine.server.address};" for engine in engines)
        file = folder / "nginx.conf"
        file.write_text(NGINX.format(folder=folder, servers=servers, port=ports[0]))
        return ("nginx", "-c", str(file), "-e", str(folder / "nginx.error"))

    return command


def router(start: Sequence[str], policy: str) -> Command:
    def command(ports: Sequence[int], engines: Sequence[Engine]) -> tuple[str, ...]:
        urls = [engine.url for engine in engines]
        line = [*start, "--host", "127.0.0.1", "--port", str(ports[0]), "--policy", policy]
        line += ["--prometheus-port", str(ports[1]), "--worker-urls", *urls]
        if policy == "kv_aware":
            for engine in engines:
                line += ["--kv-event-source", f"{engine.url}={engine.events()}"]
            line += ["--kv-event-block-size", "16", "--kv-event-model", MODEL]
        return tuple(line)

    return command


def proxies(peers: Path | None, names: Sequence[str], folder: Path) -> list[Proxy]:
    """Returns all contenders that are installed; prints why others are left out."""
    found = [Proxy("kvd", kvd, machine.commit(HERE.parent))]
    if shutil.which("nginx"):
        found.append(Proxy("nginx", nginx(folder), "of the PATH"))
    else:
        log("nginx is left out: it is not installed")
    for package, start, policies in (
        ("smg", ("-m", "smg.launch_router"), ("cache_aware",)),
        ("sglang-router", ("-m", "sglang_router.launch_router"), ("cache_aware",)),
        ("vllm-router", ("-m", "vllm_router.launch_router"),
         ("round_robin", "cache_aware", "kv_aware")),
    ):  # fmt: skip
        python = None if peers is None else peers / package / "bin" / "python"
        if python is None or not python.exists():
            log(f"{package} is left out: give --peers FOLDER with FOLDER/{package}/bin/python")
            continue
        version = machine.version(str(python), package, HERE).split(" ")[0]
        for policy in policies:
            command = router((str(python.absolute()), *start, "--log-level", "error"), policy)
            found.append(Proxy(f"{package} {policy}", command, version))
    if names:
        found = [one for one in found if any(one.name.startswith(name) for name in names)]
    return found


# ---- processes


@contextmanager
def engines_of(binary: Path, logs: Path, **options: Option) -> Iterator[list[Engine]]:
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    with ExitStack() as stack:
        found = []
        for number in range(ENGINES):
            command = (str(binary), "engine", "--model", MODEL, *flags)
            contender = Contender(f"engine-{number}", command, logs)
            found.append(Engine(stack.enter_context(running(contender, logs))))
        yield found


@contextmanager
def started(proxy: Proxy, engines: Sequence[Engine], logs: Path) -> Iterator[Target]:
    ports = free_ports(2)
    name = proxy.name.replace(" ", "-")
    contender = Contender(name, proxy.command(ports, engines), HERE.parent)
    with running_on(contender, ports[0], logs) as server:
        _wait_answers(server)
        yield Target(server.address, server.pid)


def _wait_answers(server: Server) -> None:
    """Returns once a chat is answered."""
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
    headers = {"content-type": "application/json"}
    deadline = time.monotonic() + WARM_TIMEOUT
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # the proxy is not ready yet
        finally:
            connection.close()
        if time.monotonic() > deadline:
            raise BenchError(f"{server.name} does not answer a chat")
        time.sleep(0.1)


# ---- what is measured


class Runs:
    """Runs all measurements, with the proxies in turns, and holds their results."""

    def __init__(self, binary: Path, logs: Path, found: Sequence[Proxy], rounds: int) -> None:
        self._binary, self._logs = binary, logs
        self._generator = Generator(binary)
        self._proxies = found
        self._rounds = rounds
        self._seeds = count(1)  # for texts that no engine or proxy has seen
        self.direct: dict[str, list[float]] = {}
        self.spread: dict[str, float] = {}  # the highest possible shares if all engines are used
        self.failed: list[str] = []

    def loads(self, rows: Sequence[Row]) -> None:
        """Measures every row of figures about speed."""
        with ExitStack() as stack:
            engines = stack.enter_context(engines_of(self._binary, self._logs))
            alive = [
                (one, stack.enter_context(started(one, engines, self._logs)))
                for one in self._proxies
            ]
            direct = Target(",".join(engine.server.address for engine in engines), 0)
            for load in dict.fromkeys(tuple(row.load.items()) for row in rows):
                wanted = [row for row in rows if tuple(row.load.items()) == load]
                log(", ".join(row.title for row in wanted))
                # Memory is read in the first round only: it never shrinks.
                for number in range(self._rounds):
                    base = self._run(direct, dict(load))
                    self._note(self.direct, wanted, base, None)
                    for one, target in alive:
                        result = self._run(target, dict(load))
                        first = [row for row in wanted if number == 0 or row.key != "rss_mb"]
                        self._note(one.results, first, result, base)

    def _run(self, target: Target, load: Mapping[str, Option]) -> Result:
        options = {"model": MODEL, "seed": next(self._seeds), **load}
        return self._generator.run("streams", target, **options)  # type: ignore[arg-type]

    @staticmethod
    def _note(
        results: dict[str, list[float]], rows: Sequence[Row], result: Result, base: Result | None
    ) -> None:
        for row in rows:
            if row.key in result:
                less = base[row.key] if row.beyond_direct and base is not None else 0.0
                results.setdefault(row.title, []).append(result[row.key] - less)

    def shares(self, workloads: Sequence[Workload]) -> None:
        """Measures cached shares of all workloads; for `direct`, one engine serves everything."""
        for workload in workloads:
            log(f"cached share, {workload.title}")
            cache = {"cache-blocks": workload.cache_blocks, "prefill-us": PREFILL_US}
            with engines_of(
                self._binary, self._logs, **{**cache, "cache-blocks": AMPLE}
            ) as engines:
                only = engines[0]
                self._rounds_of(Target(only.server.address, 0), workload, only)
                share, tokens = self._share([only]), only.figure("prompt_tokens")
                self.direct[workload.title] = [share]
                if workload.most_busy:  # at best, each engine computes each system prompt once
                    more = (ENGINES - 1) * workload.prompts * SYSTEM_TOKENS
                    self.spread[workload.title] = share - more / tokens
            for one in self._proxies:
                for _ in range(self._rounds):
                    with (
                        engines_of(self._binary, self._logs, **cache) as engines,
                        started(one, engines, self._logs) as target,
                    ):
                        self._rounds_of(target, workload, *engines)
                        busy = [engine.figure("requests") for engine in engines]
                        share = self._share(engines)
                    one.results.setdefault(workload.title, []).append(share)
                    shares = one.results.setdefault(busiest(workload), [])
                    shares.append(max(busy) * len(busy) / sum(busy))

    def _rounds_of(self, target: Target, workload: Workload, *engines: Engine) -> None:
        for engine in engines:
            engine.ask("POST", "/bench/reset")
        options = {"model": MODEL, "seed": next(self._seeds), **workload.load()}
        self._generator.run("rounds", target, **options)  # type: ignore[arg-type]

    @staticmethod
    def _share(engines: Sequence[Engine]) -> float:
        cached = sum(engine.figure("cached_tokens") for engine in engines)
        return cached / sum(engine.figure("prompt_tokens") for engine in engines)


def busiest(workload: Workload) -> str:
    return f"{workload.title}: busiest"


# ---- the report


def number(value: float, digits: int) -> str:
    return f"{value:,.{digits}f}"


def table(runs: Runs, found: Sequence[Proxy]) -> list[str]:
    names = [DIRECT, *(one.name for one in found)]
    lines = ["| | " + " | ".join([*names, "aim for kvd"]) + " |", "|---" * (len(names) + 2) + "|"]
    for row in ROWS:
        if any(row.title in one.results for one in found):
            base = runs.direct.get(row.title)
            cells = [number(median(base), row.digits) if base else "–"]
            cells += [_cell(one.results.get(row.title), row.digits) for one in found]
            lines.append(_line(row.title, cells, row.aims, _met(row, found)))
    for workload in WORKLOADS:
        if workload.title in runs.direct:
            cells = [number(runs.direct[workload.title][0], 3)]
            if workload.title in runs.spread:
                cells[0] += f" ({number(runs.spread[workload.title], 3)} on all engines)"
            for one in found:
                busy = median(one.results[busiest(workload)])
                cells.append(f"{median(one.results[workload.title]):.3f} ({busy:.2f})")
            aims = f"≥ {workload.aim:g}" + (
                f", ≤ {workload.most_busy:g}" if workload.most_busy else ""
            )
            title = f"cached share (busiest ÷ mean): {workload.title}"
            lines.append(_line(title, cells, aims, _shares(workload, found)))
    return lines


def _cell(values: Sequence[float] | None, digits: int) -> str:
    if not values:
        return "–"
    text = number(median(values), digits)
    if len(values) > 1:
        text += f" ({number(min(values), digits)}–{number(max(values), digits)})"
    return text


def _line(title: str, cells: Sequence[str], aims: str, met: bool | None) -> str:
    verdict = "" if met is None else ", met" if met else ", missed"
    return f"| {title} | " + " | ".join(cells) + f" | {aims}{verdict} |"


def _met(row: Row, found: Sequence[Proxy]) -> bool | None:
    values = next((one.results.get(row.title) for one in found if one.name == "kvd"), None)
    return row.aim(median(values)) if row.aim is not None and values else None


def _shares(workload: Workload, found: Sequence[Proxy]) -> bool | None:
    for one in found:
        if one.name == "kvd":
            enough = round(median(one.results[workload.title]), 3) >= workload.aim
            busy = median(one.results[busiest(workload)])
            return enough and (workload.most_busy is None or busy <= workload.most_busy)
    return None


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _stop(_signal: int, _frame: object) -> None:
    raise SystemExit("gateway.py: terminated")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="contenders, by their beginnings")
    parser.add_argument("--peers", type=Path, metavar="FOLDER", help="of virtual environments")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--only", choices=("speed", "shares"), help="a half of it")
    parser.add_argument("--json", type=Path, metavar="FILE", help="for every figure")
    parser.add_argument("--build-dir", type=Path, default=HERE / "build", help="also for logs")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _stop)
    logs = given.build_dir.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    try:
        binary = build(logs)
        found = proxies(given.peers, given.names, logs)
        runs, other = Runs(binary, logs, found, given.rounds), machine.OtherLoad()
        if given.only != "shares":
            runs.loads(ROWS)
        if given.only != "speed":
            runs.shares(WORKLOADS)
    except BenchError as error:
        print(f"gateway.py: {error}", file=sys.stderr)
        return 1
    versions = ", ".join(f"{one.name} {one.version}" for one in found)
    print(f"{machine.describe()}; {time.strftime('%Y-%m-%d')}; {versions}.")
    print(f"Other processes used {other.cores():.2f} cores. Medians of {given.rounds} (lowest to")
    print("highest).\n")
    print("\n".join(table(runs, found)))
    if given.json:
        held = {one.name: one.results for one in found} | {DIRECT: runs.direct}
        given.json.write_text(json.dumps(held, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
