"""Runs commands of kvd that end by themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from tests.support.forking import start_process
from tests.support.processes import REPOSITORY, STOP_DEADLINE_S, clean_environment

# Separates the commands' outputs on standard error; kvd itself never writes this byte there.
END = "\0"
CHILD = f"""
import json, os, sys
from kvd.cli.main import main
codes = []
for arguments in json.loads(sys.argv[1]):
    codes.append(main(arguments))
    os.write(2, {END.encode()!r})
print(json.dumps(codes))
"""


@dataclass(frozen=True)
class Ended:
    """A command that has ended: its exit code and its output."""

    code: int
    stdout: str
    stderr: str


def run_command(*arguments: str, stdout: IO[bytes] | None = None, **environ: str) -> Ended:
    """Runs one command in a process of its own; its output goes to `stdout` if that is given."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        command = [sys.executable, "-m", "kvd", *arguments]
        process = start_process(command, clean_environment(**environ), stdout or output, errors)
        try:
            code = process.wait(STOP_DEADLINE_S)
        finally:
            process.kill()
        outputs = []
        for file in (output, errors):
            file.seek(0)
            outputs.append(file.read().decode())
    return Ended(code, *outputs)


def run_each(commands: Sequence[Sequence[str]], under: Sequence[str]) -> list[Ended]:
    """Runs commands one after the other in one process, which the command `under` starts."""
    command = [*under, sys.executable, "-c", CHILD, json.dumps(commands)]
    ended = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=STOP_DEADLINE_S + len(commands),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    outputs = ended.stderr.split(END)[:-1]
    return [
        Ended(code, "", text) for code, text in zip(json.loads(ended.stdout), outputs, strict=True)
    ]
