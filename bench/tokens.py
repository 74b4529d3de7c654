"""What a bearer token costs a plain request: server CPU of kvd without tokens, with 2, with 64.

    python bench/tokens.py [--requests N] [--rounds N]

One connection asks a slot tracker for `/free` of a request that is not there, which the lane leaves
to its handler, and for `/loads` of nobody, which it answers itself; the servers take turns.
"""

from __future__ import annotations

import argparse
import socket
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from servers import Contender, Server, running

REPOSITORY = Path(__file__).resolve().parent.parent
TOKEN = "bench-0123456789abcdef"
HELD = (0, 2, 64)  # tokens


def contender(tokens: int, folder: Path) -> Contender:
    command: tuple[str, ...] = (sys.executable, "-m", "kvd", "slot-tracker")
    if tokens:
        file = folder / f"tokens{tokens}"
        others = [f"other{n} read other-0123456789-{n}\n" for n in range(tokens - 1)]
        file.write_text("".join([*others, f"bench read,lifecycle {TOKEN}\n"]))
        config = folder / f"kvd{tokens}.toml"
        config.write_text(f'tokens_file = "{file}"\n')
        command = (*command, "--config", str(config))
    return Contender(f"{tokens} tokens", command, REPOSITORY)


def cpu_ns(server: Server) -> int:
    """Returns what the server's first thread, which serves, has run."""
    return int(Path(f"/proc/{server.pid}/schedstat").read_text().split()[0])


def cost_us(server: Server, request: bytes, count: int) -> float:
    """Returns microseconds of server CPU a request."""
    with closing(socket.create_connection(("127.0.0.1", server.port))) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        before = cpu_ns(server)
        for _ in range(count):
            sock.send(request)
            reply = sock.recv(65536)
        after = cpu_ns(server)
    if reply.split()[1] not in (b"200", b"404"):
        raise SystemExit(f"{server.name}: {reply!r}")
    return (after - before) / count / 1000


def requests(tokens: int) -> dict[str, bytes]:
    shown = f"authorization: Bearer {TOKEN}\r\n" if tokens else ""
    common = f"host: 127.0.0.1\r\nuser-agent: bench\r\naccept: */*\r\n{shown}"
    body = '{"model_name":"m","request_id":"r"}'
    json = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return {
        "answered in the lane": f"GET /loads HTTP/1.1\r\n{common}\r\n".encode(),
        "by a handler": f"POST /free HTTP/1.1\r\n{common}{json}\r\n{body}".encode(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5_000, metavar="N", help="of a run")
    parser.add_argument("--rounds", type=int, default=25, metavar="N")
    args = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {n: stack.enter_context(running(contender(n, folder), folder)) for n in HELD}
        costs: dict[tuple[str, int], list[float]] = {}
        for _ in range(args.rounds):
            for held, server in servers.items():
                for name, request in requests(held).items():
                    cost = cost_us(server, request, args.requests)
                    costs.setdefault((name, held), []).append(cost)
    print(
        "| µs of CPU a request, least of all rounds | "
        + " | ".join(f"{n} tokens" for n in HELD)
        + " |"
    )
    print("|---" * (len(HELD) + 1) + "|")
    for name in requests(0):
        cells = (f"{min(costs[name, held]):.2f}" for held in HELD)
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
