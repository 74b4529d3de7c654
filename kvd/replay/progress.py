"""A progress bar on standard error, where that is a terminal."""

from __future__ import annotations

import sys
import time
from typing import TextIO

WIDTH = 30  # characters of the bar
REDRAWN_S = 0.1  # pause between two drawings of the bar


class ProgressBar:
    """A progress bar; draws nothing unless `to` is a terminal."""

    def __init__(self, total: int, to: TextIO = sys.stderr) -> None:
        self._total = max(1, total)
        self._output = to
        self._shown = to.isatty()
        self._done = 0
        self._began = self._drawn = time.monotonic()

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if self._shown and now - self._drawn >= REDRAWN_S:
            self._drawn = now
            self._output.write("\r" + line(self._done / self._total, now - self._began))
            self._output.flush()

    def close(self) -> None:
        """Removes the bar."""
        if self._shown:
            self._output.write("\r\x1b[K")
            self._output.flush()


def line(share: float, elapsed_s: float) -> str:
    """Returns the bar of a share between 0 and 1."""
    share = min(1.0, share)
    full = round(share * WIDTH)
    left = f"{elapsed_s / share - elapsed_s:,.0f} s left" if share > 0 else ""
    return f"replaying [{'#' * full}{'.' * (WIDTH - full)}] {share:4.0%}  {left:<14}"
