"""Describes the conditions of a run besides the servers: machine, its other work, versions."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import time
from pathlib import Path

VERSION_TIMEOUT = 20.0  # seconds

# Fields of the first line of /proc/stat that are neither idle nor guest time (counted in user).
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user nice system irq softirq steal


class OtherLoad:
    """CPU that neither this process nor its ended children used since construction, in cores."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._busy = _machine_cpu()
        self._own = _own_cpu()

    def cores(self) -> float:
        """Average since construction; call when all children have been reaped."""
        other = (_machine_cpu() - self._busy) - (_own_cpu() - self._own)
        return max(0.0, other) / (time.monotonic() - self._since)


def _machine_cpu() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def _own_cpu() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def resident() -> int:
    """Bytes of this process that are resident."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def describe() -> str:
    """CPU model, cores, kernel."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


def _output(command: list[str], directory: Path) -> str:
    """Trimmed standard output, empty on any failure: a version is a note, not a result."""
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=VERSION_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if not done.returncode else ""


def version(python: str, package: str, directory: Path) -> str:
    """Installed version of a distribution, and the interpreter's."""
    code = (
        "import importlib.metadata as m, platform as p;"
        f"print(m.version({package!r}), 'on Python', p.python_version())"
    )
    return _output([python, "-c", code], directory) or "not an installed distribution"


def commit(directory: Path) -> str:
    """The checked-out commit with a mark for uncommitted changes; empty outside a repository."""
    return _output(["git", "describe", "--always", "--dirty"], directory)
