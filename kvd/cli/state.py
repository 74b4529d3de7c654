"""`kvd state`: shows what a state directory holds, verifies it, and exports it as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import trio

from kvd.config.errors import StartError
from kvd.index.dumps import text_dump
from kvd.index.partitions import State
from kvd.index.restore import plan, restore
from kvd.persistence import snapshot
from kvd.persistence.bookings import KeptRequests
from kvd.persistence.clocks import ClockReading
from kvd.persistence.directory import journals
from kvd.persistence.frames import Content, CutOff, Damaged, Frame, Header, Reading, unpacked
from kvd.persistence.reading import UnreadJournal, bookings_of, frames_of
from kvd.persistence.registrations import PEERS, ROUTER_SETTINGS, ROWS

EXIT_DAMAGED = 1

Result = tuple[str, int]  # what the command prints, and its exit code
Part = Callable[[Path], object]


def show(path: Path) -> Result:
    """Returns a line for each file that says what it holds."""
    return _each(path, _shown)


def verify(path: Path) -> Result:
    """Reads every file whole; returns a line for each that says what is wrong with it."""
    return _each(path, lambda header, held: "ok")


def export(path: Path) -> tuple[Iterator[str], int]:
    """Returns all of the directory as one JSON object, in pieces that raise StartError."""
    _check_folder(path)
    return _pieces(path), 0


def _pieces(path: Path) -> Iterator[str]:
    try:
        yield from _exported(path)
    except (OSError, Damaged, UnreadJournal) as error:
        raise StartError(f"{path}: {error}") from None
    yield "}\n"


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise StartError(f"{path}: not a folder")


def _files(path: Path) -> Iterator[tuple[Content, Path]]:
    """Yields the files that exist."""
    for content in (Content.REGISTRATIONS, Content.INDEX):
        if (path / content).exists():
            yield content, path / content
    for _, journal in journals(path):
        yield Content.JOURNAL, journal


def _each(path: Path, line_of: Callable[[Header, Any], str]) -> Result:
    _check_folder(path)
    lines: list[str] = []
    code = 0
    oldest = next((file for _, file in journals(path)), None)
    for content, file in _files(path):
        try:
            header, held = _read(content, file, oldest)
            line = line_of(header, held)
        except FileNotFoundError:  # the daemon needs it no longer
            continue
        except CutOff as error:
            if content is Content.JOURNAL and file != oldest:  # just begun: older ones have all
                line = "nothing yet"
            else:
                line, code = f"damaged: {error}", EXIT_DAMAGED
        except UnreadJournal as error:
            line, code = f"damaged: {_reason(error.why)}", EXIT_DAMAGED
        except (OSError, Damaged) as error:
            line, code = f"damaged: {_reason(error)}", EXIT_DAMAGED
        lines.append(f"{file.name}: {line}\n")
    return "".join(lines) or "nothing is kept here\n", code


def _reason(error: OSError | Damaged) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _read(content: Content, file: Path, oldest: Path | None) -> tuple[Header, Any]:
    if content is Content.INDEX:
        found = trio.run(snapshot.read, file)
        return found.header, found
    header = _header(file)
    if content is Content.JOURNAL:
        is_later = file != oldest
        return header, trio.run(partial(bookings_of, [file], 0.0, is_later=is_later))
    return header, frames_of(file, content)


def _header(file: Path) -> Header:
    reading = Reading(file)
    reading.close()
    return reading.header


def _shown(header: Header, held: Any) -> str:
    age = ClockReading.now(0.0).since(header.moments)
    by = f"written {age:.0f} s ago by kvd {header.version}"
    if isinstance(held, snapshot.Snapshot):
        models = ", ".join(
            f"{entry.model_name}:{entry.tenant_id} ({entry.blocks} blocks)"
            for entry in (*held.entries, *held.holdings.entries)
        )
        streams = len(held.positions) + len(held.holdings.publishers)
        return f"{held.blocks} blocks, {streams} streams; {by}; {models or 'no model'}"
    if isinstance(held, KeptRequests):
        faces = Counter(face.value for (face, _, _), _ in held.live)
        live = ", ".join(f"{count} of {face}" for face, count in sorted(faces.items()))
        rest = f"{len(held.leases)} sessions, {len(held.answers)} answers for retries"
        return f"{len(held.live)} live requests ({live or 'none'}), {rest}; {by}"
    tables = Counter(table for table, _, _ in _rows(held))
    each = ", ".join(f"{count} of {table}" for table, count in sorted(tables.items()))
    return f"{sum(tables.values())} registrations ({each or 'none'}); {by}"


def _rows(frames: list[Frame]) -> list[tuple[str, dict[str, Any], str]]:
    return [row for each in frames if each.kind == ROWS for row in unpacked(each.content)]


def _exported(path: Path) -> Iterator[str]:
    """Yields the JSON object in pieces, without its closing brace."""
    held = {content: file for content, file in _files(path) if content is not Content.JOURNAL}
    rows = settings = peers = []
    if Content.REGISTRATIONS in held:
        frames = frames_of(held[Content.REGISTRATIONS], Content.REGISTRATIONS)
        rows = [{"table": table, **members} for table, members, _ in _rows(frames)]
        settings = [unpacked(each.content) for each in frames if each.kind == ROUTER_SETTINGS]
        peers = [url for each in frames if each.kind == PEERS for url in unpacked(each.content)]
    yield f'{{"registrations":{json.dumps(rows)},"settings_of_models":{json.dumps(settings)}'
    yield f',"peers":{json.dumps(peers)}'
    bookings = trio.run(bookings_of, [file for _, file in journals(path)], 0.0)
    yield f',"requests":{json.dumps(list(_requests(bookings)))}'
    yield f',"sessions":{json.dumps(list(_sessions(bookings)))}'
    if Content.INDEX in held:
        found = trio.run(snapshot.read, held[Content.INDEX])
        yield f',"streams":{json.dumps(list(_streams(found)))}'
        yield f',"publishers":{json.dumps(list(_publishers(found)))},"dump":'
        for piece in _dump(found):
            yield piece.decode()


def _requests(bookings: KeptRequests) -> Iterator[dict[str, Any]]:
    for ((face, key, block_size), request_id), booking in bookings.live.items():
        yield {
            "face": face,
            **key._asdict(),
            "block_size": block_size,
            "request_id": request_id,
            "worker_id": booking.booked.worker_id,
            "dp_rank": booking.booked.dp_rank,
            "blocks": len(booking.booked.hashes) // 8,
            "tokens": booking.booked.tokens,
            "prefill_complete": booking.prefill_complete,
            "output_blocks": booking.output_blocks,
            "age_s": round(-booking.booked.admitted_at, 3),
        }


def _sessions(bookings: KeptRequests) -> Iterator[dict[str, Any]]:
    for lease in bookings.leases.values():
        bound = lease.bound
        yield {
            **bound.partition._asdict(),
            "session_id": bound.session_id,
            "worker_id": bound.worker_id,
            "dp_rank": bound.dp_rank,
            "age_s": round(-lease.began_at, 3),
        }


def _streams(found: snapshot.Snapshot) -> Iterator[dict[str, Any]]:
    for key, (endpoint, position) in found.positions.items():
        yield {
            **key.partition._asdict(),
            "instance_id": key.instance_id,
            "dp_rank": key.dp_rank,
            "endpoint": endpoint,
            "next_seq": position.expected,
            "publisher": position.publisher.hex(),
            "loss": position.losses.why,
        }


def _publishers(found: snapshot.Snapshot) -> Iterator[dict[str, Any]]:
    for each in found.holdings.publishers:
        yield {
            **each.key._asdict(),
            "endpoint": each.endpoint,
            "next_seq": each.position.expected,
            "publisher": each.position.publisher.hex(),
            "loss": each.position.losses.why,
            "last_event_id": each.publication.highest,
        }


def _dump(found: snapshot.Snapshot) -> Iterator[bytes]:
    """Yields the dump of a snapshot as GET /dump would, from an index made for it."""
    state = State()
    planned = [each for each in plan(state, found.entries) if each is not None]
    for _ in restore(state, planned):
        pass
    yield from text_dump(state)
