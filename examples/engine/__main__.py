"""Runs one simulated engine until a signal ends it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import trio
import zmq

from examples.engine.options import EngineOptions
from examples.engine.server import EngineServer


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m examples.engine",
        description="Runs an engine without a model: OpenAI's API, a real prefix cache and real "
        "KV events, to try kvd with.",
    )
    usual = EngineOptions()
    parser.add_argument("--port", type=int, default=8000, help="port of its API on 127.0.0.1")
    parser.add_argument("--kind", choices=("vllm", "sglang"), default=usual.kind)
    parser.add_argument("--model", default=usual.model, help="name of its model")
    parser.add_argument("--blocks", type=int, default=usual.blocks, help="blocks of its KV cache")
    parser.add_argument(
        "--host-blocks",
        type=int,
        default=usual.host_blocks,
        help="blocks of its second tier, in host memory (sglang)",
    )
    parser.add_argument(
        "--prefill-us", type=float, default=0.0, help="microseconds per prompt token to compute"
    )
    parser.add_argument(
        "--step-us", type=float, default=0.0, help="microseconds per generated token"
    )
    parser.add_argument(
        "--mode",
        choices=("null", "prefill", "decode"),
        default=usual.mode,
        help="its disaggregation_mode (sglang); of vllm each engine prefills and decodes as asked",
    )
    parser.add_argument("--no-events", action="store_true", help="publish no KV events")
    args = parser.parse_args(argv)
    if not 0 < args.port <= 65_535:  # the system would use another one: the number modulo 65,536
        parser.error(f"argument --port: expected a port from 1 to 65535, not {args.port}")
    options = EngineOptions(
        model=args.model,
        kind=args.kind,
        blocks=args.blocks,
        host_blocks=args.host_blocks,
        prefill_s=args.prefill_us / 1e6,
        step_s=args.step_us / 1e6,
        events=not args.no_events,
        mode=args.mode,
    )
    try:
        trio.run(run, options, args.port)
    except KeyboardInterrupt:
        return 0
    return 0


async def run(options: EngineOptions, port: int) -> None:
    try:
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")
    except OSError as error:
        sys.exit(f"cannot listen on 127.0.0.1:{port}: {error.strerror}")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        server = EngineServer(options, context)
        await trio.serve_listeners(server.serve, listeners)
    finally:
        context.destroy(linger=0)


if __name__ == "__main__":
    sys.exit(main())
