"""Collects the log lines of a test."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvd.telemetry import logs


@contextmanager
def logged(level: str = "info", form: str = "logfmt") -> Iterator[Callable[[], str]]:
    """Yields a function that returns all lines so far; restores the logging configuration."""
    root = logging.getLogger()
    handlers, before = root.handlers[:], root.level
    with tempfile.TemporaryFile() as file:
        logs.setup(level, form, file.fileno())
        try:
            yield lambda: os.pread(file.fileno(), 2**20, 0).decode()
        finally:
            for handler in root.handlers:
                handler.close()
            root.handlers[:] = handlers
            root.setLevel(before)
