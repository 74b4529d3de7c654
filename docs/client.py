"""Writes docs/client.md: how to ask kvd from Python, and a reference from the code of kvd.client.

python docs/client.py > docs/client.md
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, is_typeddict

sys.path.insert(0, str(Path(__file__).parent.parent))

import kvd.client as exported
from kvd.client import (
    AsyncClient,
    Choice,
    Client,
    common,
    conductor,
    decisions,
    errors,
    gateway,
    indexer,
    picture,
    selecting,
    selection,
    slot_tracker,
)
from kvd.client.calls import Asked
from kvd.client.exchanges import ClientStats
from kvd.client.reading import OTHERS

WIDTH = 96
UNBROKEN = "\N{NO-BREAK SPACE}"  # while a signature is wrapped

HEAD = """\
# The client library

To ask kvd from Python, run `pip install '.[client]'` in its source tree (kvd, and httpx) and use
`AsyncClient` on trio, or `Client` in threads and scripts:

```python
from kvd.client import AsyncClient

async with AsyncClient() as kvd:
    async with kvd.reserve(model_name="llama-3-8b", token_ids=tokens) as choice:
        answer = await send(choice.endpoint, prompt)  # to the engine, with whatever you use
        await choice.prefill_complete()  # better at the first token, if the answer is a stream
```

```python
from kvd.client import Client

with Client(indexer="http://kvd:8090") as kvd:
    for instance, overlap in kvd.indexer.query("llama-3-8b", tokens).instances.items():
        print(instance, overlap.longest_matched)
```

Both have the same calls under the same names; those of `AsyncClient` are awaited. Every argument
and answer is typed. Complete programs are `examples/client/ask_the_indexer.py`,
`examples/client/reserve_around_a_request.py` and, without trio,
`examples/client/loads_in_a_script.py`. A program on asyncio calls `Client` in threads:
`await asyncio.to_thread(kvd.indexer.query, "llama-3-8b", tokens)`.

## Reach a daemon

Each face has its own address: `indexer`, `slot_tracker`, `selection`, `conductor`, `gateway`. The
defaults are those of `kvd serve` and `kvd gateway` on this machine.

```python
AsyncClient(
    selection="https://kvd.example:8445",  # TLS
    indexer="unix:/run/kvd/indexer.sock",  # a Unix socket
    token_file="/etc/router/kvd-token",  # or token="..."
    ca_file="kvd-ca.pem",  # instead of the system's authorities
    cert_file="router.pem",  # where the daemon wants a certificate
    key_file="router.key",
)
```

A token needs the [scopes](security.md#scopes) of the calls: `lifecycle` for `reserve`, `read` for
queries and lists, `admin` for registrations. `token_file` is read once. Proxies of the
environment are not used.

Share one client between tasks (`AsyncClient`) or threads (`Client`): it keeps connections open.
Per address, 1,000 selections and 100 other calls run at once; further ones queue in the client.

## Reserve

`reserve` takes what [`/select_and_reserve`](faces/selection.md#a-selection) does, by keyword, and
yields a [`Choice`](#choice). It frees the reservation whatever happens:

| what happens | the block | the reservation |
|---|---|---|
| its end is reached | goes on | freed; `choice.freed` is true |
| it raises, or is cancelled | raises the same | freed first, within 5 s |
| the answer to the booking is lost | begins: asked again under the same key, kvd finds the booking | freed at the end |
| it is lost repeatedly, unreadable or late | is not entered: `Unreachable`, `WrongAnswer` | freed, if it was made |
| the wait for a rank is cancelled | is not entered | none |
| kvd cannot be reached at the end | goes on, or raises the same | expires (`--request-expiry-s`); `choice.freed` is false, `stats.unfreed` one more |

The client makes up the ids; to book under yours, use `selection.select_and_reserve` and
`selection.free`.

## Errors

Everything that a call raises about a daemon is a `ClientError`:

| error | when |
|---|---|
| `Unreachable` | no connection, one that ended too early, or no answer within `timeout_s` (30) |
| `Refused` | any other status; `status`, `text` (kvd's words) and `retry_after_s` |
| `Unauthorised`, a `Refused` | 401 or 403: a token is missing, unknown or of another scope |
| `WrongAnswer` | not kvd, not that face, or longer than `max_answer_bytes` (256 MiB) |

Arguments that cannot be sent are a ValueError or TypeError.

## What is asked again

Calls that may safely come twice, and those with an `idempotency_key`, have up to four attempts
(`attempts`) within `timeout_s`; below they are marked *repeated*. The client tries again after a
connection that could not be made or ended before the answer (after about 0.1, 0.2 and 0.4 s), and
after a 429 or 503 with a `Retry-After` of at most 5 s. Silence is not repeated.

## Hashes

`/query_by_hash` and the slot tracker take hashes of blocks, which the same compiled code makes
here as in the daemon ([identifiers.md](identifiers.md)):

```python
from kvd.client import local_hashes, sequence_hashes

local = local_hashes(tokens, block_size, lora_name="adapter", cache_salt="tenant-7")
scores = kvd.indexer.query_by_hash("llama-3-8b", local)
kvd.slot_tracker.potential_loads("llama-3-8b", sequence_hashes(local))
```

`eagle_hashes` is for SGLang with EAGLE, `local_hash_mm` for a block with images.

## Newer and older daemons

Answers are frozen dataclasses. Unknown members are ignored; missing ones are a `WrongAnswer` that
names them. States such as `stream` are texts, so that a new one is no error. For the gateway's
`/v1` routes, use OpenAI's client.

## Reference

`python docs/client.py > docs/client.md` writes this page from the docstrings and signatures of
`kvd.client`.
"""  # noqa: E501 - rows of tables

ALIASES = f"""\
`InstanceId` is `{indexer.InstanceId}`, `Curve` `{picture.Curve}`, `Where` the path of a file.
`Holdings` has a `Holding` by tenant and instance.
"""

FACES = {
    "indexer": indexer.Indexer,
    "slot_tracker": slot_tracker.SlotTracker,
    "selection": selection.SelectionService,
    "conductor": conductor.Conductor,
    "gateway": gateway.Gateway,
}
ARGUMENTS = [
    each
    for each in vars(selecting).values()
    if is_typeddict(each) and each.__module__ == selecting.__name__
]
ANSWERS = (indexer, slot_tracker, decisions, conductor, gateway, common, picture)


def main() -> int:
    sys.stdout.write("\n".join(page()) + "\n")
    return 0


def page() -> Iterator[str]:
    """Yields the page, part by part."""
    yield HEAD
    yield "## Clients\n"
    for client in (AsyncClient, Client):
        yield from described(client, 3)
    yield "Both are made with:\n"
    yield code("AsyncClient", inspect.signature(AsyncClient.__init__))
    yield text(AsyncClient.__init__) + "\n"
    yield "### reserve\n"
    yield code("reserve", inspect.signature(AsyncClient.reserve), "Choice")
    yield text(AsyncClient.reserve) + "\n"
    yield from described(ClientStats, 3)
    yield from described(Choice, 3)
    for name, each in vars(Choice).items():
        if isinstance(each, property):
            yield f"`{name}`: {text(each)}\n"
    yield from calls_of(Choice)
    yield "## Calls of every face\n"
    yield from calls_of(common.EveryFace)
    yield "## Calls of faces with replicas\n"
    yield "The slot tracker and the selection service have them.\n"
    yield from calls_of(common.WithReplicas)
    for name, face in FACES.items():
        yield f"## `{name}`\n"
        yield text(face) + "\n"
        yield from calls_of(face)
    yield "## Arguments\n"
    for each in ARGUMENTS:
        yield from arguments(each)
    yield "## Answers\n"
    yield ALIASES
    yield "| answer | members |\n|---|---|"
    yield from answers()
    yield "\n## Error classes\n"
    yield from named(each for each in vars(errors).values() if inspect.isclass(each))
    yield "## Hash functions\n"
    yield from named(getattr(exported, each) for each in exported.__all__ if each.islower())


def named(documented: Iterable[Any]) -> Iterator[str]:
    """Yields names with docstrings; those of compiled functions begin with the signature."""
    for each in documented:
        first, _, rest = text(each).partition("\n")
        if first.startswith(f"{each.__name__}("):
            yield f"```python\n{first}\n```\n\n{rest.strip()}\n"
        else:
            yield f"`{each.__name__}`: {text(each)}\n"


def described(kind: type, level: int) -> Iterator[str]:
    yield f"{'#' * level} {kind.__name__}\n"
    yield text(kind) + "\n"


def text(of: Any) -> str:
    """Returns a docstring as Markdown."""
    documentation = inspect.getdoc(of) or ""
    assert documentation, of
    return documentation


def calls_of(face: type) -> Iterator[str]:
    """Yields the calls that a class defines itself."""
    for name, each in vars(face).items():
        if isinstance(each, Asked):
            signature = inspect.signature(each.make)
            keyed = "idempotency_key" in signature.parameters
            again = ", repeated" if each.route.repeatable else ", repeated with a key" * keyed
            yield f"**`{name}`**: `{each.route.name}`{again}\n"
            yield code(name, signature, shown(str(signature.return_annotation)))
            yield text(each) + "\n"


def code(name: str, signature: inspect.Signature, answer: str = "") -> str:
    """Returns a signature as a code block, as the caller sees it."""
    parts: list[str] = []
    starred = False
    for each in list(signature.parameters.values())[1:]:
        if each.kind is each.KEYWORD_ONLY and not starred:
            starred = True
            parts.append("*")
        prefix = "**" if each.kind is each.VAR_KEYWORD else ""
        annotation = shown(str(each.annotation))
        default = "" if each.default is each.empty else f" = {each.default!r}"
        if each.default is None:
            annotation = annotation.removesuffix(" | None")
        parts.append(f"{prefix}{each.name}: {annotation}{default}")
    call = f"{name}({', '.join(part.replace(' ', UNBROKEN) for part in parts)})"
    line = call + (f" -> {answer}" if answer else "")
    wrapped = textwrap.wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False)
    return "```python\n" + "\n".join(wrapped).replace(UNBROKEN, " ") + "\n```\n"


def shown(annotation: str) -> str:
    """Returns an annotation without what is only of the client's making."""
    for wrapper in ("Call", "Unpack"):
        if found := re.fullmatch(rf"{wrapper}\[(.*)\]", annotation):
            return found[1]
    return annotation


def arguments(kind: Any) -> Iterator[str]:
    """Yields the members of a TypedDict, but for those that another one has."""
    members = kind.__annotations__
    others = [each for each in ARGUMENTS if each.__annotations__.keys() < members.keys()]
    base = max(others, key=lambda each: len(each.__annotations__), default=None)
    yield f"### {kind.__name__}\n"
    yield text(kind) + (
        f" Also all of [{base.__name__}](#{base.__name__.lower()})." if base else ""
    )
    own = {name for name in members if base is None or name not in base.__annotations__}
    yield "\n" + ", ".join(f"`{name}: {typed(members[name])}`" for name in members if name in own)
    yield ""


def typed(of: Any) -> str:
    """Returns the type of a member that may be left out."""
    name = of.__forward_arg__ if hasattr(of, "__forward_arg__") else str(of)
    return name.removesuffix(" | None")


def answers() -> Iterator[str]:
    for module in ANSWERS:
        for each in vars(module).values():
            if isinstance(each, type) and is_dataclass(each) and each.__module__ == module.__name__:
                yield f"| `{each.__name__}` | {members_of(each)} |"


def members_of(kind: Any) -> str:
    base = kind.__base__
    inherited = {each.name for each in fields(base)} if is_dataclass(base) else set()
    listed = [f"all of `{base.__name__}`"] if inherited else []
    for each in fields(kind):
        if each.name in inherited:
            continue
        name = each.metadata.get("name", each.name)
        note = f" ({name} in JSON)" if name != each.name else ""
        note = " (all others)" if each.metadata == OTHERS else note
        listed.append(f"`{each.name}: {each.type}`{note}".replace("|", r"\|"))
    return f"{' '.join(text(kind).split())}<br>{', '.join(listed)}"


if __name__ == "__main__":
    sys.exit(main())
