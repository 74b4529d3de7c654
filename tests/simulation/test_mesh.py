"""Some lives of meshes of replicas."""

from __future__ import annotations

from collections import Counter

import trio

from kvd.wire.lifecycle import Outcome
from tests.simulation.mesh import Mesh
from tests.support.budget import scaled

SEEDS = scaled(5)  # 0.1 s each
REQUESTS = 60
WHILES = 2  # each uses the request ids of the one before again


async def life(seed: int) -> Counter[Outcome]:
    mesh = await Mesh.made(seed)
    outcomes: Counter[Outcome] = Counter()
    for _ in range(WHILES):
        ended = [one.name for one in mesh.requests if not one.live]
        mesh.live_a_while([*ended, *(f"{len(mesh.requests)}-{n}" for n in range(REQUESTS))])
        mesh.check()
        mesh.rest()
    for one in mesh.replicas:
        outcomes += one.outcomes
    return outcomes


def test_replicas_agree_however_steps_are_routed_and_whoever_stalls() -> None:
    outcomes: Counter[Outcome] = Counter()
    for seed in range(SEEDS):
        try:
            outcomes += trio.run(life, seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
    assert outcomes[Outcome.ENDED] and outcomes[Outcome.UNKNOWN_REQUEST] and outcomes["applied"]
