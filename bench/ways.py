"""Measures ways to answer /query with two cores: prototypes, or kvd itself.

    python bench/ways.py prototypes [--blocks-per-s 0] [--rounds 3]
    python bench/ways.py kvd

    one        one thread
    helper     a thread beside the loop scans and hashes
    readers    two threads answer from one index under a lock
    processes  two on one port, with an index each and the events of all engines
    shards     a front, and two shards with the events of half of the engines each

`ways.cpp` has the prototypes and their picture. kvd runs as one and as processes alone; they get
their shared port from a service manager's hands (docs/operations.md), which this script plays.

16 connections ask, each again as soon as it is answered, while 8 engines store blocks in events of
64 and evict as many. All servers live to the end and take turns; medians of the rounds. The
generator and the engines need a part of the two cores. At the end come the CPU of a question and
terms for `cores.py`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import machine
from cores import measured
from errors import BenchError, run
from generator import Generator, Hold, Option, build
from servers import Contender, Server, free_ports, running_on
from tails import repeated

HERE = Path(__file__).resolve().parent
LOGS = HERE / "build"
PROTOTYPES = {"one": 1, "helper": 1, "readers": 1, "processes": 2, "shards": 1}  # copies
KVD = {"one": 1, "processes": 2}
TOKENS = (512, 2_048, 8_192, 32_768, 131_072)
EVENT_BLOCKS = 64
CHURN_S = 0.5  # of one order to the engines
ALONE = "churn 500000 2 64"  # events without questions, so many that servers rarely sleep
WARM: dict[str, Option] = {"secs": 0.2, "warm": 0}
DATA: dict[str, Option] = {"pairs": 1_000_000, "workers": 8, "depth": 8_192, "block_size": 16}
FILL: dict[str, Option] = {**DATA, "event_blocks": EVENT_BLOCKS, "window": 20_000}

# Listens on both ports and becomes a kvd that serves them, as after systemd.
LISTEN = """
import fcntl, os, socket, sys
ports = sys.argv[1].split(",")
for at, port in enumerate(ports, start=3):
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", int(port)))
    sock.listen(128)
    high = fcntl.fcntl(sock.fileno(), fcntl.F_DUPFD, 100)
    sock.close()
    os.dup2(high, at)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": str(len(ports))}
os.environ["LISTEN_FDNAMES"] = ":".join(["indexer"] * len(ports))
os.execv(sys.executable, [sys.executable, "-m", "kvd", "indexer", "--port", ports[0]])
"""

Command = Callable[[str, list[str]], tuple[str, ...]]  # of a way that listens on these ports


@dataclass
class Cell:
    """The rounds of one way and length of prompt."""

    rps: list[float] = field(default_factory=list)
    p99_us: list[float] = field(default_factory=list)
    cpu_us: list[dict[str, float]] = field(default_factory=list)  # of a question, by role
    generator: list[float] = field(default_factory=list)  # cores

    def cpu(self, role: str = "") -> float:
        """Returns the CPU of a question, of all roles if none is named."""
        return median(each.get(role, 0.0) if role else sum(each.values()) for each in self.cpu_us)


@dataclass(frozen=True)
class Way:
    """The processes of a way, the port that they share, and their engines."""

    servers: list[Server]
    shared: Server
    hold: Hold

    def cpu_s(self) -> dict[str, float]:
        """Returns the CPU seconds of all threads so far, by role."""
        used: dict[str, float] = defaultdict(float)
        for server in self.servers:
            for task in Path(f"/proc/{server.pid}/task").iterdir():
                name, _, rest = task.joinpath("stat").read_text().rpartition(")")
                ticks = sum(map(int, rest.split()[11:13]))
                used[name.partition("(")[2]] += ticks / os.sysconf("SC_CLK_TCK")
        return used

    def churn(self, rate: int, seconds: float) -> None:
        """Has the engines store and evict; waits at least `seconds`."""
        if rate == 0:
            return time.sleep(seconds)
        reached = self.hold.ask(f"churn {rate} {seconds:g} {EVENT_BLOCKS}")["blocks_per_s"]
        if reached < 0.95 * rate:
            print(f"  (only {reached:,.0f} blocks/s were published)", file=sys.stderr)

    def block_us(self) -> float:
        """Measures the CPU of a block that is stored and evicted, without questions."""
        before = sum(self.cpu_s().values())
        stored = self.hold.ask(ALONE)["stored"]
        self.hold.ask("sync")
        return (sum(self.cpu_s().values()) - before) * 1e6 / stored


@contextmanager
def started(generator: Generator, name: str, copies: int, command: Command) -> Iterator[Way]:
    """Yields a way whose servers have all blocks and are in a steady state."""
    shared, *ports = free_ports(1 + copies)
    with ExitStack() as stack:
        servers = []
        for port in ports:
            contender = Contender(
                f"{name}-{port}", command(name, [str(port), str(shared)]), HERE.parent
            )
            servers.append(stack.enter_context(running_on(contender, port, LOGS)))
        urls = ",".join(server.address for server in servers)
        hold = stack.enter_context(generator.hold(servers[0], **FILL, url=urls))
        way = Way(servers, Server(name, shared, 0), hold)
        way.churn(500_000, 0.4)  # from now on the engines evict as much as they store
        hold.ask("sync")
        yield way


def answers(server: Server, bodies: list[str]) -> list[object]:
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    found = []
    for body in bodies:
        client.request("POST", "/query", body)
        found.append(json.loads(client.getresponse().read()))
    client.close()
    return found


def check_equal(generator: Generator, ways: dict[str, Way]) -> None:
    """Raises BenchError unless all servers of all ways answer alike."""
    bodies = generator.bodies(kind="query", tokens=2_048, hit=0.5, count=8, **DATA)
    found = [answers(server, bodies) for way in ways.values() for server in way.servers]
    if any(each != found[0] for each in found):
        raise BenchError("the ways answer differently")


def measure(
    generator: Generator, way: Way, asked: dict[str, Option], rate: int, cell: Cell
) -> None:
    with repeated(lambda: way.churn(rate, CHURN_S)):
        generator.run("http", way.shared, **{**asked, **WARM})
        before = way.cpu_s()
        result = generator.run("http", way.shared, **asked)
        after = way.cpu_s()
    cell.rps.append(result["rps"])
    cell.p99_us.append(result["p99_us"])
    requests = result["requests"]
    used = {role: (after[role] - before[role]) * 1e6 / requests for role in after}
    cell.cpu_us.append({role: cpu_us for role, cpu_us in used.items() if cpu_us > 0})
    cell.generator.append(result["client_cpu_us"] * result["rps"] / 1e6)


def print_table(head: str, cells: dict[tuple[int, str], Cell], ways: dict[str, Way]) -> None:
    """Prints queries/s, p99 in us, and queries/s as a multiple of those of one."""
    print(f"\n| {head} | {' | '.join(ways)} |\n|{'---|' * (1 + len(ways))}")
    for tokens in TOKENS:
        row = [f"{tokens:,}"]
        for name in ways:
            cell, one = cells[tokens, name], cells[tokens, "one"]
            text = f"{median(cell.rps):,.0f}; {median(cell.p99_us):,.0f}"
            ratio = median(mine / its for mine, its in zip(cell.rps, one.rps, strict=True))
            row.append(text if cell is one else f"{text} ×{ratio:.2f}")
        print(f"| {' | '.join(row)} |", flush=True)


def print_cpu(cells: dict[tuple[int, str], Cell], ways: dict[str, Way]) -> None:
    """Prints the CPU us of a question."""
    print(f"\n| CPU µs | {' | '.join(ways)} | generator, cores |\n|{'---|' * (2 + len(ways))}")
    for tokens in TOKENS:
        row = [f"{tokens:,}"]
        for name in ways:
            cell = cells[tokens, name]
            roles = sorted(cell.cpu_us[0])
            parts = ", ".join(f"{role} {cell.cpu(role):.1f}" for role in roles)
            row.append(f"{cell.cpu():.1f}" + (f" ({parts})" if len(roles) > 1 else ""))
        used = [median(cells[tokens, name].generator) for name in ways]
        print(f"| {' | '.join(row)} | {min(used):.2f} to {max(used):.2f} |", flush=True)


def print_terms(cells: dict[tuple[int, str], Cell], ways: dict[str, Way]) -> None:
    """Prints what `cores.py` needs beside what it measures itself, of a run without events."""
    print("\nCPU µs of a question, for bench/cores.py:\n")
    for tokens in TOKENS:
        prepare, match = measured(tokens)
        one = cells[tokens, "one"].cpu()
        parts = {"HTTP and kernel": one - prepare - match}
        if "helper" in ways:
            parts["hand over"] = cells[tokens, "helper"].cpu() - one
            parts["lock"] = cells[tokens, "readers"].cpu() - one
            shards = cells[tokens, "shards"]
            parts["ask a shard"] = (shards.cpu("front") - one + match) / 2
            parts["a shard"] = shards.cpu("shard") / 2 - match
        print(f"- {tokens:,}: {', '.join(f'{name} {us:.1f}' for name, us in parts.items())}")


def prototype(ways: Path) -> Command:
    def command(name: str, ports: list[str]) -> tuple[str, ...]:
        return str(ways), "one" if name == "processes" else name, *ports

    return command


def kvd(_: str, ports: list[str]) -> tuple[str, ...]:
    return sys.executable, "-c", LISTEN, ",".join(ports)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("of", choices=("prototypes", "kvd"))
    parser.add_argument("--blocks-per-s", type=int, nargs="+", default=[100_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each way in a round")
    options = parser.parse_args()
    generator = Generator(build(LOGS))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ways.py: terminated"))
    copies = KVD if options.of == "kvd" else PROTOTYPES
    command = kvd if options.of == "kvd" else prototype(build(LOGS, "ways"))
    print(machine.describe(), machine.commit(HERE), sep="; ")
    asked: dict[str, Option] = {"kind": "query", "hit": 0.5, "conns": 16, **DATA}
    asked |= {"secs": options.seconds, "warm": 0}
    other = machine.OtherLoad()
    with ExitStack() as stack:
        ways = {
            name: stack.enter_context(started(generator, name, copies[name], command))
            for name in copies
        }
        check_equal(generator, ways)
        for rate in options.blocks_per_s:
            cells = {(tokens, name): Cell() for tokens in TOKENS for name in ways}
            for _ in range(options.rounds):
                for (tokens, name), cell in cells.items():
                    load: dict[str, Option] = {**asked, "tokens": tokens}
                    measure(generator, ways[name], load, rate, cell)
            print_table(f"tokens, {rate:,} blocks/s", cells, ways)
            print_cpu(cells, ways)
            if rate == 0:
                print_terms(cells, ways)
            else:
                blocks = (f"{name} {way.block_us():.3f}" for name, way in ways.items())
                print(f"\nCPU µs of a block without questions: {', '.join(blocks)}.")
    print(f"\nOther processes used {other.cores():.2f} cores.")


if __name__ == "__main__":
    run(main)
