from __future__ import annotations

import pytest
import trio

from tests.simulation.sharing import Scene


@pytest.fixture
def scene(nursery: trio.Nursery) -> Scene:
    """Replicas that share state until the test ends; a test of them uses `autojump_clock`, too."""
    return Scene(nursery)
