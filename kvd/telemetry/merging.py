"""Joins the metrics of several processes into one text of Prometheus' format.

a: x 1    b: x 2    ──>    x{process="a"} 1
                           x{process="b"} 2
"""

from __future__ import annotations

HELP, TYPE = b"# HELP ", b"# TYPE "


class Merged:
    """Families of several processes, each with one HELP and TYPE and the samples of all below."""

    def __init__(self) -> None:
        self._families: dict[bytes, list[bytes]] = {}

    def add(self, process: str, text: bytes) -> None:
        """Adds the families of one process, in the form that `kvd.telemetry.metrics` renders."""
        label = b'process="%b"' % process.encode()
        lines: list[bytes] = []
        is_known = False  # an earlier process has the family: its HELP and TYPE are there
        for line in text.splitlines():
            if line.startswith(HELP):
                name = line.split(b" ", 3)[2]
                is_known = name in self._families
                lines = self._families.setdefault(name, [])
            if not line.startswith((HELP, TYPE)):
                lines.append(_labelled(line, label))
            elif not is_known:
                lines.append(line)

    def render(self) -> bytes:
        """Returns the text."""
        return b"".join(line + b"\n" for lines in self._families.values() for line in lines)


def _labelled(sample: bytes, label: bytes) -> bytes:
    name, brace, others = sample.partition(b"{")
    if brace:  # it begins labels, since neither a name nor a value has one
        return b"%b{%b,%b" % (name, label, others)
    name, _, value = sample.partition(b" ")
    return b"%b{%b} %b" % (name, label, value)
