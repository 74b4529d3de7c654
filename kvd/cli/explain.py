"""Explains why a request goes where it goes: `kvd explain`.

a prompt, or a live request ──> POST /explain, of the first face that answers ──> tables, or JSON
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvd.cli.face_client import FaceClient, FaceRefused, ask_first
from kvd.config.binds import Bind
from kvd.config.parsers import U64_DIGITS
from kvd.faces.common.paths import EXPLAIN_PATH
from kvd.telemetry.logs import plain
from kvd.wire.event_stream import StreamHealth

EXPLAINED, REFUSED = 0, 1  # exit codes

TIMEOUT_S = 30.0  # for an answer
PIPED_COLUMNS = 140  # width of the output if it is not a terminal
MOST_EVENTS = 20  # events shown in a terminal, the newest
STDIN = "-"

# Members of the request body by the options that set them.
MEMBERS = {
    "request": "request_id",
    "model_name": "model_name",
    "tenant_id": "tenant_id",
    "lora_name": "lora_name",
    "cache_salt": "cache_salt",
}
# Texts for the reasons why a match ends.
REASONS = {
    "end_of_prompt": "all of it",
    "evicted": "evicted",
    "cleared": "cleared with its cache",
    "restarted": "its engine restarted",
    "never_stored": "never stored",
    "not_reusable": "held, but not what else its reuse needs",
    "unknown": "not known: too long ago",
    "other_salt": "cached with another salt",
    "other_adapter": "cached with another adapter",
    "other_tenant": "cached for another tenant",
    "not_predicted": "not booked there lately",
    "not_heard": "its events are not heard",
    "no_events": "it sends no events",
}
REFUSALS = {
    "nobody_eligible": "nobody can serve it",
    "all_busy": "all are busy: it would wait",
    "all_overloaded": "all exceed a busy threshold: it would be refused",
    "no_selection": "kvd chooses no worker for this model; what each caches:",
}

# Where a prompt that names no model is refused: few fleets have a model called `default`.
MODEL_HINT = "; --model-name names the model of the prompt"

Json = dict[str, Any]


class WrongPrompt(Exception):
    """The prompt cannot be used; the text says why."""


def question(given: Mapping[str, object]) -> Json:
    """Returns the request body for the given prompt and options; raises WrongPrompt."""
    path = given["prompt"]
    body: Json = {}
    if path:
        body = _prompt(_read(str(path)))
    elif given["request"] is None:
        raise WrongPrompt("name a file with a prompt, `-` for standard input, or --request ID")
    options = {MEMBERS[name]: given[name] for name in MEMBERS if given[name] is not None}
    return body | options


def _read(path: str) -> str:
    try:
        return sys.stdin.read() if path == STDIN else Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise WrongPrompt(f"cannot read {path}: {reason}") from None


def _prompt(text: str) -> Json:
    """Reads a body of /select, or token ids: a JSON array, or separated by blanks or commas."""
    if text.lstrip()[:1] not in ("{", "["):
        words = re.split(r"[\s,]+", text.strip())
        if not all(map(_is_token_id, words)):
            raise WrongPrompt("a prompt is token ids, or the JSON body of POST /select")
        return {"token_ids": [int(word) for word in words]}
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongPrompt(f"the prompt is not JSON: {error}") from None
    return found if isinstance(found, dict) else {"token_ids": found}


def _is_token_id(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= U64_DIGITS


def ask(binds: Mapping[str, Bind], client: FaceClient, body: Json) -> Json:
    """Returns the explanation of the first face that answers; raises FaceRefused, or Unreached."""
    sent = json.dumps(body).encode()

    def ask_face(name: str, bind: Bind) -> Json:
        found: Json = json.loads(client.ask(bind, EXPLAIN_PATH, TIMEOUT_S, sent))
        return found

    try:
        return ask_first(binds, ask_face)
    except FaceRefused as error:
        unnamed = not {"model_name", "request_id"} & body.keys()
        raise FaceRefused(f"{error}{MODEL_HINT if unnamed else ''}") from None


# ---- for people


def text(found: Json) -> str:
    """Returns an explanation as tables, as wide as the terminal."""
    wide = shutil.get_terminal_size((PIPED_COLUMNS, 0)).columns
    if not sys.stdout.isatty():
        wide = max(wide, PIPED_COLUMNS)
    console = Console(file=StringIO(), width=wide, highlight=False, markup=False)
    console.print(Text(_heading(found)))
    for choice in found["choices"]:
        console.print()
        for line in _choice(choice):
            console.print(Text(line))
        console.print(_candidates(choice, found["blocks"]))
        if choice["more_candidates"]:
            console.print(Text(f"and {choice['more_candidates']:,} more"))
    console.print()
    console.print(Text(_reach(found)))
    if found["timeline"]:
        console.print(_timeline(found["timeline"][-MOST_EVENTS:]))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in shown.splitlines()) + "\n"


def _heading(found: Json) -> str:
    text = f"{found['blocks']:,} blocks of {found['block_size']} tokens, model "
    text += plain(f"{found['model_name']}, tenant {found['tenant_id']}")
    if (booked := found["request"]) is not None:
        text += (
            f"; request {plain(booked['request_id'])}, booked on {_rank(booked)} "
            f"{booked['age_s']:,.1f} s ago: as if it came once more"
        )
    return text


def _choice(choice: Json) -> Iterator[str]:
    phase = "" if choice["phase"] is None else f"{choice['phase']}: "
    if choice["refusal"] is not None:
        yield f"{phase}{REFUSALS[choice['refusal']]}"
    chosen, second = choice["chosen"], choice["runner_up"]
    if choice["by"] is not None:
        way = f"by {choice['by'].replace('_', ' ')}, policy {plain(choice['router_policy'])}"
        if choice["temperature"]:
            way += f", temperature {choice['temperature']:g}"
        unit = "" if choice["unit"] is None else f", costs in {choice['unit']}"
        yield f"{phase}{way}{unit}"
    if chosen is not None:
        chance = "" if chosen["chance"] == 1 else f" by a chance of {chosen['chance']:.1%}"
        yield f"chosen: {_rank(chosen)}{chance}{_runner_up(second)}"


def _runner_up(second: Json | None) -> str:
    if second is None:
        return ""
    text = f"; runner-up: {_rank(second)}"
    if second["behind"] is not None:
        text += f", {_figure(second['behind'])} behind"
    return text


def _candidates(choice: Json, blocks: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    weighs = choice["by"] is not None
    titles = ["rank", *(("chance", "cost", "terms") if weighs else ()), "cached", "why no more"]
    for title in titles:
        table.add_column(title, justify="right" if title in ("chance", "cost") else "left")
    for each in choice["candidates"]:
        cells = [_rank(each)]
        if weighs:
            cells += [_chance(each), _figure(each["cost"]), " + ".join(_terms(each))]
        table.add_row(*cells, _cached(each, blocks), _end_reason(each))
    return table


def _chance(candidate: Json) -> str:
    if candidate["shut_out"] is None:
        return f"{candidate['chance']:.0%}"
    return str(candidate["shut_out"]).replace("_", " ")


def _terms(candidate: Json) -> Iterator[str]:
    """Yields the factor of a candidate's terms, and each term that is not zero."""
    shown = [each for each in candidate["terms"] if each["cost"]]
    if candidate["preference"] != 1:
        yield f"{candidate['preference']:.3g} ×"
    yield from (f"{each['name']} {_figure(each['cost'])}" for each in shown)


def _cached(candidate: Json, blocks: int) -> str:
    tiers = [
        f"{each['tier']} {each['to'] - each['from']:,}"
        for each in candidate["tiers"]
        if each["to"] > each["from"]
    ]
    if candidate["predicted_blocks"]:
        tiers.append(f"predicted {candidate['predicted_blocks']:,}")
    detail = f" ({', '.join(tiers)})" if tiers else ""
    return f"{candidate['blocks']:,} of {blocks:,}{detail}"


def _end_reason(candidate: Json) -> str:
    """Returns why a candidate caches no more; events that were missed make that doubtful."""
    is_exact = candidate["stream"] in (None, StreamHealth.EXACT)
    doubt = "" if is_exact else f"; its stream is {candidate['stream']}"
    return _end(candidate["ended"]) + doubt


def _end(ended: Json) -> str:
    text = REASONS[ended["why"]]
    if ended["why"] == "end_of_prompt":
        return text
    if ended["elsewhere_blocks"] is not None:
        text += f", {ended['elsewhere_blocks']:,} blocks"
    if ended["tier"] is not None:
        text += f" from {ended['tier']}" if ended["why"] == "evicted" else f" ({ended['tier']})"
    if ended["age_s"] is not None:
        text += f" {_age(ended['age_s'])}"
    return f"block {ended['at_block']:,}: {text}"


def _reach(found: Json) -> str:
    chronicle = found["chronicle"]
    if not chronicle["capacity"]:
        return "what happened to blocks is not recorded: index_chronicle is 0"
    known = "what happened to" if found["timeline"] else "nothing is recorded of"
    changes, reach_s = chronicle["changes"], chronicle["reach_s"]
    return f"{known} these blocks (changes recorded: {changes:,}, up to {reach_s:,.0f} s ago)"


def _timeline(events: Iterable[Json]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for each in events:
        blocks = (
            "all" if each["from"] == each["to"] else f"blocks {each['from']:,} to {each['to']:,}"
        )
        cells = _age(each["age_s"]), _rank(each), each["kind"], ", ".join(each["tiers"]), blocks
        table.add_row(*cells)
    return table


def _rank(each: Json) -> str:
    return plain(f"{each['worker_id']}:{each['dp_rank']}")


def _age(age_s: float) -> str:
    return f"{age_s:,.1f} s ago"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}".removesuffix(".00")
