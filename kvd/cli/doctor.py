"""Reports what keeps prompts from matching, and how to mend it: `kvd doctor`.

    GET /diagnose?probe=1, of the first face that answers ──> findings ──> text, JSON, an exit code

The daemon has the evidence, and probes its engines itself: the command may not reach them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import TextIO

from kvd.cli.face_client import FaceClient, ask_first
from kvd.config.binds import Bind
from kvd.faces.common.paths import DIAGNOSE_PATH

WELL, ILL = 0, 1  # exit codes

# Time for an answer: the daemon probes engines for ten seconds at most.
TIMEOUT_S = 30.0
REDRAWN_S = 0.2  # pause between two drawings of the progress

Finding = dict[str, str]


def examine(binds: Mapping[str, Bind], client: FaceClient, *, probes: bool) -> list[Finding]:
    """Returns the findings of the first face that answers; raises Unreached."""
    path = f"{DIAGNOSE_PATH}?probe=1" if probes else DIAGNOSE_PATH

    def ask(name: str, bind: Bind) -> list[Finding]:
        with progress(f"asking the {name} at {bind}, which probes its engines"):
            found: list[Finding] = json.loads(client.ask(bind, path, TIMEOUT_S))["findings"]
            return found

    return ask_first(binds, ask)


def exit_code(found: list[Finding]) -> int:
    return ILL if found else WELL


def text(found: list[Finding]) -> Iterator[str]:
    """Yields the findings as lines for people."""
    for each in found:
        yield f"{each['severity']}: {each['name']}: {each['subject']}"
        yield f"    found   {each['evidence']}"
        yield f"    remedy  {each['remedy']}"
    if not found:
        yield "nothing is wrong"


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Shows how long a step takes, if standard error is a terminal."""
    to = sys.stderr
    if not to.isatty():
        yield
        return
    over = Event()
    drawing = Thread(target=_draw, args=(what, to, over))
    drawing.start()
    try:
        yield
    finally:
        over.set()
        drawing.join()


def _draw(what: str, to: TextIO, over: Event) -> None:
    began = time.monotonic()
    while not over.wait(REDRAWN_S):
        to.write(f"\r\x1b[K{what}: {time.monotonic() - began:.0f} s")
        to.flush()
    to.write("\r\x1b[K")
    to.flush()
