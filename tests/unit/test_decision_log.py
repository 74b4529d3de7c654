"""The decision log: the content of lines, and files that stay within their bounds."""

from __future__ import annotations

import json
import os
import resource
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from kvd.replay import decision_log
from kvd.replay.figures import measure_recorded
from kvd.replay.recording import ReplayError
from kvd.replay.traffic import Traffic
from kvd.selection import decisions
from kvd.selection.decisions import DecisionLog
from kvd.telemetry import rotating
from kvd.telemetry.metrics import render
from kvd.telemetry.rotating import RotatingWriter, files_of
from kvd.wire.lifecycle import Lifecycle, Step
from tests.support.descriptors import lowest_free_descriptor
from tests.support.exposition import parse
from tests.support.held_selections import ready
from tests.support.selecting import BLOCK_SIZE, EXPIRY_S, M, Service, worker

PATIENCE_S = 30.0
WALL = 1_763_000_000.0


class Logged:
    """A service whose choices are logged."""

    def __init__(self, path: Path, service: Service, **writing: Any) -> None:
        self.path = path
        self.service = service
        self.wall = WALL
        self.writer = RotatingWriter(path, **{"max_bytes": 1 << 20, "files": 3} | writing)
        selections = self.service.selections
        self.log = DecisionLog(selections.candidates, self.writer, lambda: int(self.wall * 1e9))
        selections.reservations.moments.subscribe(self.log.note)

    def lines(self) -> list[dict[str, Any]]:
        """Ends the log and returns its lines."""
        self.writer.close(PATIENCE_S)
        text = "".join(file.read_text() for file in files_of(self.path))
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each logged hash stand for two blocks."""
    monkeypatch.setattr(decisions, "LOGGED_TOKENS", 2 * BLOCK_SIZE)


@pytest.mark.usefixtures("coarse")
async def test_a_line_a_step(tmp_path: Path) -> None:
    logged = Logged(tmp_path / "log", await ready(worker(1), worker(2)))
    service = logged.service
    service.select([11, 12, 13, 14, 15], 21, reservation_id="first", expected_output_tokens=9)
    logged.wall += 2.5
    service.selections.reservations.prefill_complete("first")
    for _ in range(3):
        service.selections.reservations.output_block("first", None)
    logged.wall += 1
    service.selections.reservations.free("first")
    service.select([11, 12], 8)  # not booked: it may not have been sent
    choice, prefilled, end = logged.lines()
    hashes = b64decode(choice.pop("hashes"))
    assert len(hashes) == 2 * 8  # for tokens up to 8 and 16; the last block is half of a pair
    assert choice == {
        "at": WALL,
        "event": "choice",
        "model": M.model_name,
        "tenant": M.tenant_id,
        "request": "first",
        "prompt_tokens": 21,
        "hashed_tokens": 8,
        "candidates": 2,
        "matched": [],
        "worker_id": choice["worker_id"],
        "dp_rank": 0,
        "cost": choice["cost"],
        "cached_tokens": 0,
        "prefill_tokens": 21,
        "queued_tokens": 0,
        "expected_output_tokens": 9,
    }
    assert choice["worker_id"] in (1, 2) and choice["cost"] > 0
    assert prefilled == {"at": WALL + 2.5, "event": "prefill_complete", "request": "first"}
    assert end == {"at": WALL + 3.5, "event": "end", "request": "first", "output_tokens": 12}


async def test_what_is_cached_is_in_the_line(tmp_path: Path) -> None:
    logged = Logged(tmp_path / "log", await ready(worker(1), worker(2)))
    pool = logged.service.candidates().pool
    for row, blocks in zip(pool.candidates, (1, 2), strict=True):
        assert row.worker is not None
        row.worker.store(0, [101, 102][:blocks], [11, 12][:blocks])
    logged.service.select([11, 12, 13], 13, reservation_id="first")
    (choice,) = logged.lines()
    assert choice["matched"] == [[2, 0, 2], [1, 0, 1]]
    assert (choice["worker_id"], choice["cached_tokens"], choice["prefill_tokens"]) == (2, 8, 5)


async def test_others_choices_are_theirs_and_expiry_is_an_end(tmp_path: Path) -> None:
    logged = Logged(tmp_path / "log", await ready(worker(1), worker(2)))
    service = logged.service
    service.select([11, 12], 8, reservation_id="first")
    add = Lifecycle(M, BLOCK_SIZE, "other", 1, 0, Step.ADD, bytes(8), 4)
    service.selections.reservations.apply(add, service.now)
    service.now += EXPIRY_S + 1
    service.expire()
    choice, *ends = logged.lines()
    assert choice["request"] == "first"
    assert [(line["event"], line["request"], line["dropped"]) for line in ends] == [
        ("end", "first", True),
        ("end", "other", True),
    ]


async def test_a_line_has_a_bounded_number_of_hashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decisions, "LOGGED_TOKENS", BLOCK_SIZE)
    monkeypatch.setattr(decisions, "MAX_LOGGED_HASHES", 10)
    logged = Logged(tmp_path / "log", await ready(worker(1), worker(2)))
    logged.service.select(list(range(50)), 200, reservation_id="first")
    (choice,) = logged.lines()
    assert len(b64decode(choice["hashes"])) == 10 * 8
    assert decision_log.read(logged.path, None, None).requests[0].input_tokens == 200


# ---- as recorded requests


@pytest.mark.usefixtures("coarse")
async def test_a_log_is_a_recording(tmp_path: Path) -> None:
    logged = Logged(
        tmp_path / "log", await ready(worker(1), worker(2)), max_bytes=600, files=100
    )  # a line or two in each file
    service = logged.service
    reservations = service.selections.reservations
    for number in range(4):
        prompt = [11, 12, 13, 14, 20 + number, 30 + number]
        service.select(prompt, 25, reservation_id=f"of-{number}")
        logged.wall += 0.5
        reservations.prefill_complete(f"of-{number}")
        logged.wall += 3.0
        reservations.free(f"of-{number}")
        logged.wall += 1.5
    service.select([1], 4, reservation_id="live")
    logged.lines()
    assert len(files_of(logged.path)) > 3
    recording = Traffic(logged.path).recording()
    assert [each.arrival_s for each in recording.requests] == [0.0, 5.0, 10.0, 15.0, 20.0]
    assert [each.input_tokens for each in recording.requests] == [25, 25, 25, 25, 4]
    assert [each.output_tokens for each in recording.requests] == [100] * 4 + [1]
    assert [len(each.blocks) for each in recording.requests] == [3, 3, 3, 3, 0]
    assert len({each.blocks[:2] for each in recording.requests[:4]}) == 1
    assert len({each.blocks[2] for each in recording.requests[:4]}) == 4
    assert (recording.block_size, recording.engines, recording.spread_s) == (8, 2, 0.0)
    figures = measure_recorded(recording.requests, recording.recorded)
    assert (figures.ttft_mean, figures.whole) == (0.5, 3.5)
    assert figures.token_interval == pytest.approx(3.0 / 99)


def test_the_most_frequent_model_is_replayed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    line = {
        "at": 1.0,
        "event": "choice",
        "tenant": "t",
        "prompt_tokens": 4,
        "hashed_tokens": 4,
        "hashes": "AQAAAAAAAAA=",
        "candidates": 2,
        "cached_tokens": 0,
        "expected_output_tokens": 3,
    }
    rows = [line | {"model": model, "request": str(at)} for at, model in enumerate("aabaa")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = decision_log.read(path, None, None)
    assert (len(found.requests), found.left_out) == (4, 1)
    assert found.requests[0].blocks == (1,) and found.requests[0].output_tokens == 3
    found = decision_log.read(path, 2, None)
    assert (len(found.requests), found.left_out) == (2, 1)
    assert len(decision_log.read(path, None, "b").requests) == 1
    with pytest.raises(ReplayError, match="no request of model 'c'"):
        decision_log.read(path, None, "c")
    with path.open("a") as log:
        log.write('{"at":2.0,"event":"choice"}\n')
    with pytest.raises(ReplayError, match="damaged"):
        decision_log.read(path, None, None)


# ---- files


def test_a_missing_number_hides_no_older_file(tmp_path: Path) -> None:
    path = tmp_path / "log"
    kept = ["log.3", "log.1", "log"]
    for name in kept:
        (tmp_path / name).write_text("")
    assert [file.name for file in files_of(path)] == kept
    path.unlink()  # a rotation has moved it, and was ended before it opened the next one
    assert [file.name for file in files_of(path)] == kept[:2]


def test_files_rotate_within_their_bounds(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"before\n")
    writer = RotatingWriter(path, 100, 3)
    for number in range(100):
        writer.write(b"%019d\n" % number)
    writer.close(PATIENCE_S)
    files = files_of(path)
    assert [file.name for file in files] == ["log.2", "log.1", "log"]
    assert all(file.stat().st_size <= 100 for file in files)
    assert {file.stat().st_mode & 0o777 for file in files[1:]} == {0o600}
    kept = [int(line) for file in files for line in file.read_text().split()]
    assert kept == list(range(100 - len(kept), 100))
    assert (writer.accepted, writer.dropped, writer.failed) == (100, 0, 0)


def test_one_file_alone_begins_anew(tmp_path: Path) -> None:
    writer = RotatingWriter(tmp_path / "log", 100, 1)
    for number in range(7):
        writer.write(b"%019d\n" % number)
    writer.close(PATIENCE_S)
    assert [int(line) for line in (tmp_path / "log").read_text().split()] == [5, 6]
    assert files_of(tmp_path / "log") == [tmp_path / "log"]


def test_a_removed_log_begins_anew(tmp_path: Path) -> None:
    for files in (1, 2):
        path = tmp_path / f"log-of-{files}"
        writer = RotatingWriter(path, 100, files)
        path.unlink()
        for number in range(7):
            writer.write(b"%019d\n" % number)
        writer.close(PATIENCE_S)
        assert writer.failed == 0, files
        assert [int(line) for line in path.read_text().split()] == [5, 6], files


def test_a_rotation_that_opens_no_file_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotating, "BATCHED_S", 0)
    path = tmp_path / "log"
    before = {"log": "newest", "log.1": "older", "log.2": "oldest"}
    for name, text in before.items():
        (tmp_path / name).write_text(f"{text}\n")
    writer = RotatingWriter(path, 10, 4)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free_descriptor(), hard))
    try:
        for number in range(3):
            writer.write(b"lost\n")
            while writer.failed == number:
                os.sched_yield()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    writer.write(b"written\n")
    writer.close(PATIENCE_S)
    assert path.read_text().split() == ["written"]
    assert [file.read_text() for file in files_of(path)[:-1]] == ["oldest\n", "older\n", "newest\n"]


async def test_lines_beyond_the_bound_are_dropped_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotating, "MAX_WAITING_BYTES", 50)
    monkeypatch.setattr(rotating, "BATCHED_S", PATIENCE_S)  # nothing is written until the end
    logged = Logged(tmp_path / "log", await ready(worker(1), worker(2)))
    for number in range(4):
        logged.writer.write(b"%19d\n" % number)
    assert (logged.writer.accepted, logged.writer.dropped) == (2, 2)
    found = parse(b"".join(render(logged.log.families())).decode())
    assert found['kvd_decision_log_lines_total{outcome="dropped"}'] == 2
    assert found["kvd_decision_log_waiting_bytes"] == 40
    assert logged.lines() == [0, 1]
    assert logged.writer.waiting_bytes == 0


def test_a_disk_that_takes_nothing_loses_lines_alone(tmp_path: Path) -> None:
    writer = RotatingWriter(tmp_path / "log", 100, 2)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, writer._file)
    os.close(full)
    writer.write(b"lost\n")
    writer.close(PATIENCE_S)
    assert (writer.accepted, writer.failed, writer.waiting_bytes) == (1, 1, 0)


def test_half_a_line_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"at":1.0,"event":"cho')  # by a process that was killed
    writer = RotatingWriter(path, 1000, 2)
    writer.write(b"whole\n")
    writer.close(PATIENCE_S)
    assert path.read_bytes() == b'{"at":1.0,"event":"cho\nwhole\n'


async def test_damaged_lines_are_left_out(tmp_path: Path) -> None:
    logged = Logged(tmp_path / "log", await ready(worker(1)))
    logged.service.select([11, 12], 8, reservation_id="first")
    logged.lines()
    with logged.path.open("a") as log:
        log.write('{"at":1.0,"event":"cho\n\nhalf\n5\n')
    os.replace(logged.path, tmp_path / "log.1")
    logged.path.touch()  # a file that has just been created
    recording = Traffic(logged.path).recording()
    assert (len(recording.requests), recording.damaged) == (1, 3)


async def test_the_first_line_may_be_damaged(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text('{"at":1.0,"event":"cho')  # of a disk that was full when the file began
    logged = Logged(path, await ready(worker(1)))
    logged.service.select([11, 12], 8, reservation_id="first")
    logged.writer.close(PATIENCE_S)
    recording = Traffic(path).recording()
    assert (len(recording.requests), recording.damaged) == (1, 1)


def test_what_cannot_be_a_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        RotatingWriter(tmp_path / "none" / "log", 100, 2)
    with pytest.raises(OSError, match="not a regular file"):
        RotatingWriter(Path("/dev/null"), 100, 2)


def test_a_service_without_a_log_observes_speeds_alone() -> None:
    selections = Service().selections
    assert selections.reservations.moments.subscribers == [selections.speeds.observe]
