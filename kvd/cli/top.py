"""Shows in a terminal, again and again, what a running daemon does: `kvd top`.

    thread   GET /picture, of the first face that answers ──> the last picture, or what went wrong
    here     keys, the size of the terminal, the last picture ──> a screen that fits

q, Ctrl-C and SIGTERM end the command, which then restores the terminal. It also ends when the
terminal goes.
"""

from __future__ import annotations

import codecs
import errno
import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import TextIOWrapper
from threading import Event, Thread
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvd.cli.face_client import OTHER_FORM, FaceClient, Unreached, ask_first, reason
from kvd.config.binds import Bind
from kvd.faces.common.paths import PICTURE_PATH
from kvd.telemetry.logs import complain, plain
from kvd.wire.event_stream import StreamHealth

LEFT, NO_TERMINAL = 0, 1  # exit codes

KEYS_S = 0.2  # longest wait for a key before the size of the terminal, and signals, are checked
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BARS = "▁▂▃▄▅▆▇█"
ASCII_BARS = "_.:-=+*#"  # for a terminal whose encoding lacks BARS
MOST_BARS = 30  # samples of a curve: a minute
SHOWN_DECISIONS = 5  # recent choices shown where there is room
SHOWN_DOUBTFUL = 5  # inexact streams listed
STYLES = {
    StreamHealth.EXACT: "green",
    StreamHealth.RECOVERING: "yellow",
    StreamHealth.DEGRADED: "red",
    StreamHealth.STALE: "red",
}
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class PictureAnswer:
    """The result of the last request: a picture, or the reason why there is none."""

    picture: Json | None
    where: str


class Asker:
    """Asks for pictures in a thread of its own, so that keys never wait for an answer."""

    def __init__(self, binds: Mapping[str, Bind], client: FaceClient, interval_s: float) -> None:
        self._binds = binds
        self._client = client
        self._interval_s = interval_s
        self._ended = Event()
        self.last = PictureAnswer(None, "asking")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Asks until the context ends, which does not wait for an answer that is still due."""
        Thread(target=self._run, daemon=True).start()
        try:
            yield
        finally:
            self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            self.last = self._ask()
            self._ended.wait(self._interval_s)

    def _ask(self) -> PictureAnswer:
        def ask(name: str, bind: Bind) -> PictureAnswer:
            picture = json.loads(self._client.ask(bind, PICTURE_PATH))
            return PictureAnswer(picture, f"{name} {bind}")

        try:
            return ask_first(self._binds, ask)
        except Unreached as error:
            return PictureAnswer(None, str(error))


@contextmanager
def _keys(ended: Event) -> Iterator[int]:
    """Makes the terminal pass on each key at once; yields the descriptor to read keys from.

    A signal that asks for the end sets `ended`. Its handler does not raise, because it may run
    where exceptions are dropped, such as in a destructor.
    """

    def end(number: int, frame: FrameType | None) -> None:
        ended.set()

    stdin = sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    handlers = {each: signal.signal(each, end) for each in ENDS}
    try:
        tty.setcbreak(stdin)
        yield stdin
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


def run(binds: Mapping[str, Bind], client: FaceClient, interval_s: float) -> int:
    """Shows pictures until it is asked to stop, and returns the exit code."""
    console = Console()
    # A terminal that cannot move its cursor (TERM=dumb) would show nothing.
    if not (console.is_terminal and sys.stdin.isatty()) or console.is_dumb_terminal:
        complain("kvd top needs a terminal to draw on; `kvd status` writes lines")
        return NO_TERMINAL
    assert isinstance(sys.stdout, TextIOWrapper)
    codecs.register_error(_replaced.__name__, _replaced)
    sys.stdout.reconfigure(errors=_replaced.__name__)
    asker = Asker(binds, client, interval_s)
    ended = Event()
    try:
        with _keys(ended) as keys, asker.running(), _screen(console) as live:
            _show(console, live, asker, keys, ended)
    except (OSError, termios.error) as error:
        if error.args[0] != errno.EIO:
            raise
        # The terminal has gone. Output that is still buffered would fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return LEFT


def _replaced(error: UnicodeError) -> tuple[str, int]:
    """Replaces characters that the terminal lacks by others of the same width."""
    assert isinstance(error, UnicodeEncodeError)
    lacking = error.object[error.start : error.end]
    shown = ("?" if each not in BARS else ASCII_BARS[BARS.index(each)] for each in lacking)
    return "".join(shown), error.end


def _screen(console: Console) -> Live:
    return Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")


def _show(console: Console, live: Live, asker: Asker, keys: int, ended: Event) -> None:
    """Redraws the screen at each change, until q is pressed or `ended` is set."""
    drawn: object = None
    last: Json | None = None
    scrolled = 0
    while not ended.is_set():
        answer, size = asker.last, console.size
        last = answer.picture or last
        if drawn != (state := (id(answer), size, scrolled)):
            try:
                shown = screen(answer, last, size.width, size.height, scrolled)
            except OTHER_FORM as error:
                asker.last, last, drawn = PictureAnswer(None, reason(error)), None, None
                continue
            live.update(shown, refresh=True)
            drawn = state
        if not select.select([keys], [], [], KEYS_S)[0]:
            continue
        pressed = os.read(keys, 16)
        if pressed in (b"", b"q", b"Q"):  # or the terminal has gone
            return
        most = 0 if last is None else max(0, len(last["ranks"]) - 1)
        scrolled = min(most, max(0, scrolled + _steps(pressed, size.height // 2)))


def _steps(pressed: bytes, page: int) -> int:
    """Returns by how many workers a key scrolls."""
    ways = {b"j": 1, b"\x1b[B": 1, b"k": -1, b"\x1b[A": -1, b" ": page, b"\x1b[6~": page}
    return {**ways, b"b": -page, b"\x1b[5~": -page}.get(pressed, 0)


def screen(
    answer: PictureAnswer, last: Json | None, width: int, height: int, scrolled: int
) -> Group:
    """Returns as much of the picture as fits on a screen of so many columns and lines."""
    state = Text(" ".join(("kvd", "" if last is None else last["kvd"]["version"])), "bold")
    if answer.picture is None:
        state.append(f"  {plain(answer.where)}", "red" if last or answer.where != "asking" else "")
    else:
        state.append(f"  {plain(answer.where)}  {time.strftime('%H:%M:%S')}", "not bold")
    foot = Text("q quits, arrows and space scroll", "dim")
    if last is None:
        return Group(_cut(state), foot)
    if last["more_ranks"]:
        foot.append(f"; the first {len(last['ranks']):,} ranks")
    rates = _rates(last["history"], width)[: max(1, height // 4)]  # leave room for workers
    parts: list[RenderableType] = [_cut(state), *rates]
    parts += _streams(last)
    decisions = last["decisions"][:SHOWN_DECISIONS] if height >= 24 else []
    room = height - len(parts) - 2 - (len(decisions) + 2 if decisions else 0)
    parts.append(_ranks(last, width, max(1, room), scrolled))
    if decisions:
        parts += [Text(), _decisions(decisions, width)]
    return Group(*parts, foot)


def _cut(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _rates(history: Json, width: int) -> list[Text]:
    """Returns the curves of all ranks, two in a line where there is room."""
    shown = (
        ("requests/s", "requests_per_s", False),
        ("events/s", "events_per_s", False),
        ("live", "live", False),
        ("queued", "queued", False),
        ("cached", "cached_share", True),
        ("matched", "matched_share", True),
    )
    columns = 2 if width >= 60 else 1
    bars = min(MOST_BARS, max(0, width // columns - 22))
    cells = []
    for title, name, is_share in shown:
        values = history[name]
        value = _latest(values) if is_share else values[-1] if values else None
        figure = _share(value) if is_share else _number(value)
        cell = Text(f"{title:10} {figure:>8} ")
        cell.append(f"{curve(values, bars, 1.0 if is_share else 0.0):{bars}} ", "cyan")
        cells.append(cell)
    lines = [cells[at : at + columns] for at in range(0, len(cells), columns)]
    return [_cut(Text.assemble(*line)) for line in lines]


def _streams(picture: Json) -> list[Text]:
    """Returns the number of streams in each state, and a list of inexact ones."""
    counts = picture["streams"]["counts"]
    line = Text("streams    ")
    for name, count in counts.items():
        if count:
            line.append(f"{count:,} {name}  ", STYLES.get(StreamHealth(name), ""))
    lines = [line if any(counts.values()) else Text("streams    none", "dim")]
    for each in picture["streams"]["doubtful"][:SHOWN_DOUBTFUL]:
        why = "; ".join(each[name] for name in ("status", "why") if name in each)
        lines.append(Text(f"  {each['of']} {plain(_rank(each))}: ", ""))
        lines[-1].append(each["stream"], STYLES[StreamHealth(each["stream"])])
        lines[-1].append(f", {plain(why)}")
    for model in picture["models"]:
        if model["never_matches"]:
            name = plain(f"{model['model_name']}/{model['tenant_id']}")
            lines.append(Text(f"  {name}: no question has ever matched", "red"))
    return [_cut(each) for each in lines]


def _ranks(picture: Json, width: int, room: int, scrolled: int) -> Table:
    """Returns a table of as many ranks as there is room for."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True, ratio=3, overflow="ellipsis")
    table.add_column("stream", no_wrap=True)
    table.add_column("live", no_wrap=True, justify="right")
    bars = min(MOST_BARS, max(0, (width - 70) // 2))
    if bars:
        table.add_column("", no_wrap=True)
    table.add_column("cached", no_wrap=True, justify="right")
    if bars:
        table.add_column("", no_wrap=True)
    table.add_column("blocks", no_wrap=True, justify="right")
    if width >= 100:
        table.add_column("by tier", no_wrap=True, ratio=2, overflow="ellipsis")
    ranks = picture["ranks"]
    most = max((value or 0 for each in ranks for value in each.get("requests", ())), default=0)
    for each in ranks[scrolled : scrolled + room - 1]:
        blocks = each.get("blocks", {})
        requests, shares = each.get("requests", ()), each.get("cached_share", ())
        cells: list[str | Text] = [
            Text(plain(_rank(each))),
            _rank_state(each),
            _number(each["load"]["requests"] if "load" in each else None),
            *([Text(curve(requests, bars, most), "cyan")] if bars else []),
            _share(_latest(shares)),
            *([Text(curve(shares, bars, 1.0), "cyan")] if bars else []),
            _number(sum(blocks.values())),
        ]
        if width >= 100:
            tiers = (f"{tier} {count:,}" for tier, count in blocks.items() if count)
            cells.append(", ".join(tiers))
        table.add_row(*cells)
    return table


def _rank_state(rank: Json) -> Text:
    if rank.get("lifecycle", "schedulable") != "schedulable":
        return Text(rank["lifecycle"], "red")
    health = rank.get("stream")
    return Text("no events", "dim") if health is None else Text(health, STYLES[health])


def _decisions(decisions: Sequence[Json], width: int) -> Table:
    """Returns the last choices, the newest first."""
    table = Table(box=None, expand=True, padding=(0, 1, 0, 0), header_style="dim")
    for title, ratio in (("ago", None), ("request", 2), ("worker", 2)):
        table.add_column(title, no_wrap=True, ratio=ratio, overflow="ellipsis")
    table.add_column("cached of prompt", no_wrap=True, justify="right")
    if width >= 80:
        table.add_column("cost", no_wrap=True, justify="right")
    for each in decisions:
        prompt = each["cached_tokens"] + each["prefill_tokens"]
        cells: list[str | Text] = [
            f"{each['age_s']:.0f} s",
            Text(plain(each["request"])),
            Text(plain(_rank(each))),
            f"{each['cached_tokens']:,} of {prompt:,}",
        ]
        table.add_row(*cells, *([f"{each['cost']:,.2f}"] if width >= 80 else []))
    return table


def curve(values: Sequence[float | None], width: int, most: float) -> str:
    """Returns the last values as bars, the newest at the right, blank where one is missing."""
    shown = list(values)[-width:] if width else []
    top = max((value for value in (*shown, most) if value), default=1.0)
    bars = (
        " " if value is None else BARS[min(7, max(0, round(7 * value / top)))] for value in shown
    )
    return "".join(bars).rjust(width)


def _rank(each: Json) -> str:
    tenant = "" if each["tenant_id"] == "default" else f"/{each['tenant_id']}"
    return f"{each['worker_id']}:{each['dp_rank']} {each['model_name']}{tenant}"


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
