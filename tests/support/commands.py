"""Runs commands of kvd that end by themselves, one after the other in one process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.processes import REPOSITORY, STOP_DEADLINE_S, clean_environment

# The end of what one command says on standard error; kvd writes no such byte there.
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
    """A command that has ended: its exit code, and what it has said on standard error."""

    code: int
    stderr: str


def run_each(commands: Sequence[Sequence[str]], under: Sequence[str] = ()) -> list[Ended]:
    """Runs each command, all of them by the command `under` if there is one."""
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
    said = ended.stderr.split(END)[:-1]
    return [Ended(*each) for each in zip(json.loads(ended.stdout), said, strict=True)]
