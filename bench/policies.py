"""Replays a trace as `kvd replay` does, also under live selection services.

    python bench/policies.py TRACE [--policy NAME]... [--peer-python PY]

Takes the options of `kvd replay`, and two more policies: `live-kvd` and `live-dynamo` run the
selection services of kvd and of Dynamo as processes, over HTTP and ZMQ, with their defaults.
`live-kvd,policy=NAME` starts kvd's with that policy. Time is simulated: the figures do not show how
fast a service is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from errors import BenchError
from servers import Contender, running
from service_router import ServiceRouter

from kvd.cli import replay as command
from kvd.cli import replay_report
from kvd.replay import policies
from kvd.replay.figures import Figures, measure
from kvd.replay.policies import Chooser
from kvd.replay.recording import ReplayError
from kvd.replay.routers import CoreRouter
from kvd.replay.runs import Case
from kvd.replay.simulation import SimulatedFleet, replay
from kvd.replay.traffic import Traffic

HERE = Path(__file__).resolve().parent
LIVE_KVD, LIVE_DYNAMO = "live-kvd", "live-dynamo"
# Dynamo must neither queue requests nor let them expire: the replay's time is not real time.
ENVIRON = {"DYN_ROUTER_QUEUE_THRESHOLD": "None", "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": "86400"}


@dataclass(frozen=True)
class Service:
    """A selection service to start."""

    name: str
    command: tuple[str, ...]
    policy: Chooser  # by which kvd's core judges its choices

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class LiveCase:
    """One replay under a service."""

    traffic: Traffic
    fleet: SimulatedFleet
    service: Service
    seed: int
    logs: Path

    def run(self, report: Callable[[int], None]) -> Figures:
        requests = self.traffic.requests(self.seed)
        follower = CoreRouter(self.fleet, self.service.policy.settings(), self.seed)
        with self._router(follower) as router:
            outcome = replay(requests, self.fleet, router, report)
            lowest = f"{router.cheapest:,} of {router.choices:,} choices"
        print(
            f"{self.service}, round {self.seed}: {lowest} are of the lowest cost by kvd's account",
            file=sys.stderr,
        )
        return measure(outcome, self.traffic.counts)

    @contextmanager
    def _router(self, follower: CoreRouter) -> Iterator[ServiceRouter]:
        self.logs.mkdir(parents=True, exist_ok=True)
        environ = ("env", *(f"{key}={value}" for key, value in ENVIRON.items()))
        contender = Contender(
            f"{self.service}-{self.seed}", environ + self.service.command, HERE.parent
        )
        with running(contender, self.logs) as server:
            router = ServiceRouter(self.fleet, server, follower)
            try:
                yield router
            finally:
                router.close()


def service(name: str, peer_python: str | None) -> Service:
    """Returns the service of a name; raises BenchError."""
    if name == LIVE_DYNAMO:
        if peer_python is None:
            raise BenchError("--peer-python is needed")
        # With more threads, Dynamo loses blocks of engines that share tokens.
        made = (peer_python, "-m", "dynamo.select_service", "--threads", "1")
        return Service(name, made, Chooser("dynamo"))
    kind, _, policy = name.partition(",policy=")
    if kind != LIVE_KVD:
        raise BenchError(f"there is no service {name}")
    chosen = policies.parse(policy or "dynamo")
    options = ("select-service", "--router-policy", chosen.text)
    return Service(name, (sys.executable, "-m", "kvd", *options), chosen)


def case(
    traffic: Traffic,
    fleet: SimulatedFleet,
    asked: Chooser | Service,
    seed: int,
    given: argparse.Namespace,
) -> Case | LiveCase:
    if isinstance(asked, Service):
        return LiveCase(traffic, fleet, asked, seed, given.build_dir / "logs")
    return replay_report.case(traffic, fleet, asked, seed, given)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_options(parser, policy=str)
    group = parser.add_argument_group("live services")
    group.add_argument("--peer-python", metavar="PY", help="interpreter that has dynamo")
    group.add_argument("--build-dir", type=Path, default=HERE / "build", help="for services' logs")
    given = parser.parse_args(argv)
    names = given.policy or [*map(str, policies.DEFAULT), LIVE_KVD]
    given.policy = [
        service(name, given.peer_python) if name.startswith("live-") else policies.parse(name)
        for name in names
    ]
    print("\n".join(replay_report.report(given, case)))


if __name__ == "__main__":
    try:
        main()
    except (BenchError, ReplayError) as error:
        sys.exit(str(error))
