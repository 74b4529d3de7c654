"""Keeps the tests of this folder and their fixtures from starting processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.tiers import PROCESSES, forbidding


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Iterator[None]:
    with forbidding(PROCESSES):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    with forbidding(PROCESSES):
        yield
