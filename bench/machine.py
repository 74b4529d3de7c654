"""Describes the conditions of a run: the machine, its other work, versions."""

from __future__ import annotations

import hashlib
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

VERSION_TIMEOUT = 20.0  # seconds

# Fields of the first line of /proc/stat that are neither idle nor guest time (counted in user).
BUSY_FIELDS = (0, 1, 2, 5, 6, 7)  # user nice system irq softirq steal


class OtherLoad:
    """Measures the CPU that other processes use, in cores.

    That is all but the use of this process and of its children that have ended.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._busy = _machine_cpu()
        self._own = _own_cpu()

    def cores(self) -> float:
        """Returns the average since construction; to be called once all children are reaped."""
        other = (_machine_cpu() - self._busy) - (_own_cpu() - self._own)
        return max(0.0, other) / (time.monotonic() - self._since)


def _machine_cpu() -> float:
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(fields[i]) for i in BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")


def _own_cpu() -> float:
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def fixed_work(seconds: float) -> list[float]:
    """Hashes 1 MiB again and again beside a busy process; returns the CPU ms of each, sorted.

    The work is always the same, so differences are the machine's. Where a hypervisor runs others in
    between, a guest sees that time as CPU time of its own.
    """
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            piece, found, end = bytes(1 << 20), [], time.monotonic() + seconds
            while time.monotonic() < end:
                before = time.thread_time_ns()
                hashlib.blake2b(piece).digest()
                found.append((time.thread_time_ns() - before) / 1e6)
        finally:
            busy.kill()
    return sorted(found)


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of a process, over all threads, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident() -> int:
    """Returns the resident bytes of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def describe() -> str:
    """Returns the CPU's model, its cores and the kernel."""
    models = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    model = models[0] if models else platform.machine()
    return f"{model}, {os.cpu_count()} cores, Linux {platform.release()}"


def _output(command: list[str], directory: Path) -> str:
    """Returns the trimmed standard output; "" on any failure, as a version is only a note."""
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=VERSION_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if not done.returncode else ""


def version(python: str, package: str, directory: Path) -> str:
    """Returns the installed version of a distribution, and the interpreter's."""
    code = (
        "import importlib.metadata as m, platform as p;"
        f"print(m.version({package!r}), 'on Python', p.python_version())"
    )
    return _output([python, "-c", code], directory) or "not an installed distribution"


def commit(directory: Path) -> str:
    """Returns the checked-out commit, marked if files differ from it; "" outside a repository."""
    return _output(["git", "describe", "--always", "--dirty"], directory)
