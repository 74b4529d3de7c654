"""Checks what is freed without Python's collector, whose full runs are rare."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freed_at_once(kind: type) -> Iterator[None]:
    """Runs without the collector, and checks that no object of this kind is left at the end."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert not [one for one in gc.get_objects() if isinstance(one, kind)]
    finally:
        gc.enable()
