"""Measures the cost of kept and shared state, and how soon replicas that share it agree.

    python bench/shared_state.py [--server redis-server] [--peer-python /path/to/venv/bin/python]

Cost is measured on four daemons in turns in one run: one without state; one with a state directory
and a snapshot each second; one that shares state through a server; one with replica sync to another
one. It is the cost of the life of a request (/add of 2,048 tokens in blocks of 16,
/prefill_complete, /free), as CPU over all threads of the process and wall time p50 and p99, and of
/query of 512 tokens while a client books on the daemon all the time. Then come the commands and
bytes that the server receives for each life on the daemon that shares state.

Delay is the time from the answer to /add on one replica until another one's /loads shows the
booking: through the server, by replica sync, and with --peer-python by Dynamo's slot trackers.

Healing is the time until all three replicas have all bookings: after the server stood still, was
emptied, or was killed and came back empty; after a replica stood still, or was killed and came
back; and after a sentinel has replaced the server by a copy.

Needs `pip install .[test]`, and a Redis or Valkey server.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from agreeing import delays, healing, kvd_command, register, serving, state_server, syncing
from daemons import LIVES, MODEL, ROUNDS, Client, asks, lives, p50_p99, started
from errors import BenchError
from machine import cpu_s
from servers import free_ports

from tests.support.state_servers import StateServer

QUESTIONS = 2000  # in a round


class Variant:
    """One daemon with its clients, and the times that it took."""

    def __init__(self, name: str, flags: list[str], folder: Path, stack: ExitStack) -> None:
        self.name = name
        self._port, index = free_ports(2)
        flags = [f"--indexer-bind=127.0.0.1:{index}", *flags]  # overrides that of `kvd_command`
        command = kvd_command(self._port, *flags)
        self._pid = stack.enter_context(serving(self._port, folder, command)).pid
        register(self._port)
        worker = {"instance_id": 1, "endpoint": "tcp://127.0.0.1:1", "block_size": 16}
        asks(index, "/register", MODEL | worker)
        self._booker, self._asker = Client(self._port), Client(index)
        self._folder = folder
        self.lives: list[float] = []
        self.questions: list[float] = []
        self.cpu_s = 0.0

    def live(self) -> None:
        before = cpu_s(self._pid)
        self.lives += lives(self._booker, len(self.lives))
        self.cpu_s += cpu_s(self._pid) - before

    def ask(self) -> None:
        """Times questions while another process books."""
        booking = [sys.executable, __file__, "--book", str(self._port)]
        question = MODEL | {"token_ids": list(range(512))}
        with started(booking, self._folder / "book.log"):
            for _ in range(QUESTIONS):
                began = time.perf_counter()
                self._asker.ask("POST", "/query", question)
                self.questions.append(time.perf_counter() - began)

    def row(self) -> str:
        took = [1e6 * each for each in (*p50_p99(self.lives), *p50_p99(self.questions))]
        cpu = 1e6 * self.cpu_s / len(self.lives)
        return f"| {self.name} | {cpu:.0f} | " + " | ".join(f"{each:,.0f}" for each in took) + " |"


def costs(kind: str, folder: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(state_server(folder, kind))
        listener, mine, theirs = free_ports(3)
        command = kvd_command(listener, *syncing(theirs, mine))
        stack.enter_context(serving(listener, folder, command))
        register(listener)
        kept = [f"--state-dir={folder / 'state'}", "--snapshot-s=1"]
        compared = {
            "without state": [],
            "state directory": kept,
            "shared state": [f"--state-url={server.url}"],
            "replica sync": list(syncing(mine, theirs)),
        }
        variants = [Variant(name, flags, folder, stack) for name, flags in compared.items()]
        before = had(server)
        for _ in range(ROUNDS):
            for each in variants:
                each.live()
        commands, size = (after - at for after, at in zip(had(server), before, strict=True))
        for _ in range(ROUNDS):
            for each in variants:
                each.ask()
        print("| | life: CPU us | p50 us | p99 us | query: p50 us | p99 us |")
        print("|---|---|---|---|---|---|")
        for each in variants:
            print(each.row())
        every = ROUNDS * LIVES
        print(f"\nThe server: {commands / every:.2f} commands and {size / every:.0f} bytes a life")


def had(server: StateServer) -> tuple[int, int]:
    """Returns how many commands and bytes a server has received."""
    text = server.ask(b"INFO stats").decode()
    found = dict(line.split(":", 1) for line in text.splitlines() if ":" in line)
    return int(found["total_commands_processed"]), int(found["total_net_input_bytes"])


def book_on(port: int) -> None:
    """Books and frees until the process is ended."""
    client = Client(port)
    # Ids begin at the time: an earlier process may have left requests under lower ones.
    for first in count(time.time_ns() // 1000, LIVES):
        lives(client, first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", default="redis-server", help="a Redis or Valkey server")
    parser.add_argument("--peer-python", help="Python with ai-dynamo, to be measured beside")
    parser.add_argument("--book", type=int, metavar="PORT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.book is not None:
        book_on(options.book)
    if shutil.which(options.server) is None:
        sys.exit(f"{options.server} is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            costs(options.server, folder)
            delays(options.server, options.peer_python, folder)
            healing(options.server, folder)
        except BenchError as error:
            logs = "".join(path.read_text()[-800:] for path in folder.glob("*.log"))
            sys.exit(f"{error}\n{logs}")


if __name__ == "__main__":
    main()
