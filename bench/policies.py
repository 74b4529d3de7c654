"""Replays a trace of requests against simulated engines under several routing policies.

    python bench/policies.py TRACE [POLICY ...] [--peer-python PY]

Prints Markdown; time is simulated, so nothing here says how fast a router is. A policy is one of

    round-robin, random, least-loaded, kv   kvd's selector in this process, in that mode
    preset:NAME                             the same in mode kv, by a policy of that name
    kvd, dynamo                             the selection service as a process, over HTTP and ZMQ

and may be followed by settings of kvd_core.selector.settings, of which the services take weight and
temperature: kv,overlap_weight=2,temperature=0.1
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import BenchError
from replay.core_router import CoreRouter
from replay.service_router import ServiceRouter
from replay.simulation import Fleet, replay
from replay.summary import TITLES, Figures, measure, row
from replay.trace import BLOCK_SIZE, Prompts, Request, read, reusable_share
from servers import Contender, running

from kvd.selection.policies import RouterPolicy
from kvd_core.selector.settings import KV, LEAST_LOADED, RANDOM, ROUND_ROBIN, Settings

HERE = Path(__file__).resolve().parent

MODES = {
    "round-robin": ROUND_ROBIN,
    "random": RANDOM,
    "least-loaded": LEAST_LOADED,
    "kv": KV,
}
PRESETS = {f"preset:{policy}": policy for policy in RouterPolicy}
SERVICES = ("kvd", "dynamo")
VARIABLES = {
    "overlap_weight": "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
    "temperature": "DYN_ROUTER_TEMPERATURE",
}
# Nothing is held in a queue of the router, nor forgotten: real time is not that of the replay.
ENVIRON = {"DYN_ROUTER_QUEUE_THRESHOLD": "None", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "86400"}


class Policies:
    """Replays requests under a policy."""

    def __init__(self, arguments: argparse.Namespace, requests: Sequence[Request]) -> None:
        self.fleet = Fleet(arguments.engines, arguments.capacity)
        self._arguments = arguments
        self._requests = requests
        self._prompts = Prompts()
        self.cheapest: Counter[str] = Counter()  # choices of services that nothing was cheaper than
        self.choices: Counter[str] = Counter()

    def replay(self, policy: str, seed: int) -> Figures:
        """Returns the figures of one round."""
        name, values = _parsed(policy)
        preset = PRESETS.get(name, RouterPolicy.DYNAMO).row
        chosen = Settings(mode=MODES.get(name, KV), **{**preset, **values})
        router = CoreRouter(self.fleet.engines, chosen, self._prompts, seed)
        if name not in SERVICES:
            return measure(replay(self._requests, self.fleet, router))
        with self._service(name, values, router) as service:
            outcome = replay(self._requests, self.fleet, service)
        self.cheapest[policy] += service.cheapest
        self.choices[policy] += service.choices
        return measure(outcome)

    @contextmanager
    def _service(
        self, name: str, values: dict[str, float], follower: CoreRouter
    ) -> Iterator[ServiceRouter]:
        environ = ENVIRON | {VARIABLES[key]: str(value) for key, value in values.items()}
        logs = self._arguments.build_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        command = ("env", *(f"{key}={value}" for key, value in environ.items()))
        contender = Contender(name, command + self._command(name), HERE.parent)
        with running(contender, logs) as server:
            router = ServiceRouter(self.fleet.engines, server, self._prompts, follower)
            try:
                yield router
            finally:
                router.close()

    def _command(self, name: str) -> tuple[str, ...]:
        if name == "kvd":
            return (sys.executable, "-m", "kvd", "select-service")
        # With more threads it loses blocks of engines that share tokens.
        peer = self._arguments.peer_python
        return (peer, "-m", "dynamo.select_service", "--threads", "1")


def _parsed(policy: str) -> tuple[str, dict[str, float]]:
    """Returns a policy's name and settings; raises BenchError."""
    name, *settings = policy.split(",")
    if name not in (*MODES, *PRESETS, *SERVICES):
        raise BenchError(f"unknown policy {name}")
    try:
        values = {key: float(value) for key, value in (each.split("=") for each in settings)}
        Settings(**values)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise BenchError(f"{policy}: {error}") from None
    if name in SERVICES and not values.keys() <= VARIABLES.keys():
        raise BenchError(f"{policy}: a service takes {' and '.join(VARIABLES)}")
    return name, values


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="in Mooncake's form")
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="all, without settings")
    parser.add_argument("--peer-python", metavar="PY", help="interpreter that has dynamo")
    parser.add_argument("--engines", type=int, default=Fleet.engines)
    parser.add_argument("--capacity", type=int, default=Fleet.capacity, help="blocks an engine")
    parser.add_argument("--requests", type=int, metavar="N", help="only the first ones")
    parser.add_argument("--speed", type=float, default=1.0, help="arrivals come so much faster")
    parser.add_argument("--rounds", type=int, default=1, help="replays, each with its own seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--build-dir", type=Path, default=HERE / "build", help="for servers' logs")
    arguments = parser.parse_intermixed_args(argv)
    if not arguments.policies:
        arguments.policies = [*MODES, "kvd", *(["dynamo"] if arguments.peer_python else [])]
    for policy in arguments.policies:
        if _parsed(policy)[0] == "dynamo" and not arguments.peer_python:
            parser.error("--peer-python is needed")
    return arguments


def _head(arguments: argparse.Namespace, requests: Sequence[Request], fleet: Fleet) -> str:
    tokens = sum(request.input_tokens for request in requests)
    speed = fleet.speed
    facts = {
        "trace": f"{arguments.trace.stem}, {len(requests):,} requests in "
        f"{requests[-1].arrival_s:,.0f} s, {tokens / len(requests):,.0f} prompt tokens each; "
        f"one cache without bounds would have had {reusable_share(requests):.1%} of them",
        "engines": f"{fleet.engines} with {fleet.capacity:,} blocks of {BLOCK_SIZE} tokens each; "
        f"prefill {speed.prefill_tokens_per_s:,.0f} tokens/s in chunks of {speed.chunk_tokens:,}; "
        f"a step {speed.step_s * 1000:g} ms, {speed.step_s_per_request * 1000:g} ms a request, "
        f"{speed.step_s_per_block * 1000:g} ms a block in use; "
        f"{speed.max_batch} requests at once",
        "rounds": f"{arguments.rounds}, seeds from {arguments.seed} on; figures are their means",
    }
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items())


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _arguments(argv)
    requests = read(arguments.trace, arguments.requests, arguments.speed)
    policies = Policies(arguments, requests)
    print(_head(arguments, requests, policies.fleet), end="\n\n")
    print(f"| {' | '.join(TITLES)} |\n|{'---|' * len(TITLES)}", flush=True)
    for policy in arguments.policies:
        seeds = range(arguments.seed, arguments.seed + arguments.rounds)
        print(row(policy, [policies.replay(policy, seed) for seed in seeds]), flush=True)
    for policy, choices in policies.choices.items():
        cheapest = f"{policies.cheapest[policy]:,} of {choices:,}"
        print(f"\n{policy}: {cheapest} choices are of the lowest cost by kvd's account")


if __name__ == "__main__":
    try:
        main()
    except BenchError as error:
        sys.exit(str(error))
