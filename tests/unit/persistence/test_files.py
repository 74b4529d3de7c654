"""The files of a state directory: what is read, what is refused with which words; ages."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from kvd.persistence.clocks import ClockReading, ClockTranslation
from kvd.persistence.directory import InUse, StateDirectory
from kvd.persistence.frames import (
    MAGIC,
    Content,
    CutOff,
    Damaged,
    Header,
    Reading,
    frame,
    opening,
)
from tests.support.full_disks import no_longer_files

THEN = ClockReading(clock=100.0, monotonic=5000.0, wall=1e9, boot="one")
HEADER = Header(Content.REGISTRATIONS, "process", THEN)
FRAMES = [frame(7, b"first"), frame(7, b""), frame(8, b"third" * 9)]


@pytest.fixture
def written(tmp_path: Path) -> Path:
    directory = StateDirectory(tmp_path)
    directory.replace(HEADER, FRAMES)
    directory.close()
    return directory.file(Content.REGISTRATIONS)


def contents(path: Path) -> list[tuple[int, bytes]]:
    reading = Reading(path)
    try:
        assert reading.header == HEADER
        return [(each.kind, each.content) for each in reading.whole_frames()]
    finally:
        reading.close()


def test_what_was_written_is_read(written: Path) -> None:
    assert contents(written) == [(7, b"first"), (7, b""), (8, b"third" * 9)]
    assert written.stat().st_mode & 0o777 == 0o600


def test_any_cut_and_any_changed_bit_is_found(written: Path) -> None:
    data = written.read_bytes()
    for size in range(len(data)):
        written.write_bytes(data[:size])
        with pytest.raises(Damaged):
            contents(written)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        written.write_bytes(changed)
        with pytest.raises(Damaged):
            contents(written)
    written.write_bytes(data + b"x")
    with pytest.raises(Damaged, match="bytes follow its end"):
        contents(written)


def test_other_files_and_later_formats_are_named(written: Path) -> None:
    data = written.read_bytes()
    for text, match in (
        (b"PK\3\4" + data, "not a file of a kvd state directory"),
        (MAGIC + b"9" + data[len(MAGIC) + 1 :], "cannot read its format '9'"),
        (MAGIC + b"1" + frame(1, b""), "it has no header"),
        (MAGIC + b"1" + frame(ord("H"), b"\x80"), "its header is not understood"),
    ):
        written.write_bytes(text)
        with pytest.raises(Damaged, match=match):
            Reading(written)
    written.write_bytes(b"")
    with pytest.raises(CutOff):
        Reading(written)


def test_a_torn_end_is_no_damage_where_it_may_be(written: Path) -> None:
    start = opening(HEADER)
    for size in range(len(FRAMES[2])):
        written.write_bytes(start + FRAMES[0] + FRAMES[2][:size])
        reading = Reading(written)
        assert [each.content for each in reading.frames(torn=8)] == [b"first"]
        assert reading.whole == len(start) + len(FRAMES[0])
        reading.close()
    broken = bytearray(FRAMES[0])
    broken[-1] ^= 1
    written.write_bytes(start + broken + FRAMES[1])  # a sound frame follows the broken one
    reading = Reading(written)
    with pytest.raises(Damaged, match="checksum"):
        list(reading.frames(torn=7))
    reading.close()


def test_a_changed_bit_before_the_last_frame_is_no_torn_end(written: Path) -> None:
    """If the bit is in a frame's length, the frame may seem to reach beyond the end."""
    data = opening(HEADER) + frame(7, b"a" * 40) + frame(7, b"bb") + frame(7, b"c" * 9)
    last = len(data) - len(frame(7, b"c" * 9))
    for at in range(len(MAGIC) + 1, last):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        written.write_bytes(changed)
        with pytest.raises(Damaged):
            _read_to_a_torn_end(written)
    for at in range(last, len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        written.write_bytes(changed)
        assert _read_to_a_torn_end(written) == [b"a" * 40, b"bb"]


def _read_to_a_torn_end(path: Path) -> list[bytes]:
    reading = Reading(path)
    try:
        return [each.content for each in reading.frames(torn=7)]
    finally:
        reading.close()


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A pipe would block its reader, and some devices have no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/zero")
    for name in ("pipe", "folder", "device"):
        with pytest.raises((Damaged, IsADirectoryError)):
            Reading(tmp_path / name)


def test_a_directory_that_was_put_elsewhere_is_taken_again(tmp_path: Path) -> None:
    path = tmp_path / "state"
    first = StateDirectory(path)
    path.rename(tmp_path / "elsewhere")
    first.replace(HEADER, FRAMES)
    with pytest.raises(InUse):
        StateDirectory(path)
    assert len(contents(path / "registrations")) == len(FRAMES)
    path.rename(tmp_path / "gone")
    second = StateDirectory(path)
    with pytest.raises(InUse):  # another process has it now
        first.replace(HEADER, FRAMES)
    first.close()
    second.close()


def test_a_fault_at_the_close_of_a_removed_lock_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk in the network may report only then that it has not taken some bytes."""
    path = tmp_path / "state"
    directory = StateDirectory(path)
    lock, close = directory._lock, os.close

    def close_with_fault(descriptor: int) -> None:
        close(descriptor)
        if descriptor == lock:
            monkeypatch.undo()
            raise OSError(122, "Disk quota exceeded")

    shutil.rmtree(path)
    monkeypatch.setattr(os, "close", close_with_fault)
    directory.replace(HEADER, FRAMES)
    directory.replace(HEADER, FRAMES)
    directory.close()


def test_threads_that_write_take_a_directory_again_together(tmp_path: Path) -> None:
    path = tmp_path / "state"
    directory = StateDirectory(path)
    contents = Content.INDEX, Content.REGISTRATIONS

    def replace(content: Content, at_once: Barrier) -> None:
        at_once.wait()
        directory.replace(Header(content, "process", THEN), FRAMES)

    with ThreadPoolExecutor(len(contents)) as threads:
        for _ in range(100):
            shutil.rmtree(path)
            at_once = Barrier(len(contents))
            for done in [threads.submit(replace, content, at_once) for content in contents]:
                done.result()
    directory.close()


def test_a_full_disk_keeps_nobody_from_a_directory(tmp_path: Path) -> None:
    StateDirectory(tmp_path).close()
    with no_longer_files(0):
        StateDirectory(tmp_path).close()


def test_a_write_that_fails_leaves_the_last_file(written: Path) -> None:
    before = written.read_bytes()
    directory = StateDirectory(written.parent)

    def failing() -> list[bytes]:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        directory.replace(HEADER, (each for each in failing()))
    assert written.read_bytes() == before
    assert sorted(path.name for path in written.parent.iterdir()) == ["lock", "registrations"]
    directory.close()


def test_a_directory_has_one_owner_and_no_leftovers(tmp_path: Path) -> None:
    (tmp_path / "index.new").write_bytes(b"of a process that was killed")
    first = StateDirectory(tmp_path)
    assert not (tmp_path / "index.new").exists()
    with pytest.raises(InUse, match="in use by process"):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


def test_ages_across_a_restart_are_by_the_clock_of_the_machine() -> None:
    """They are right although the wall clock was set back by a day meanwhile."""
    now = ClockReading(clock=7.0, monotonic=5010.0, wall=1e9 - 86_400, boot="one")
    translate = ClockTranslation.between(THEN, now)
    assert translate(100.0) == -3.0  # 10 s ago
    assert translate(104.0) == 1.0
    assert translate(1000.0) == 897.0  # distances stay the same


@pytest.mark.parametrize(("wall", "age"), [(1e9 + 60, 60.0), (1e9 - 5, 0.0)])
def test_ages_across_a_boot_are_by_the_wall_clock(wall: float, age: float) -> None:
    now = ClockReading(clock=7.0, monotonic=3.0, wall=wall, boot="two")
    assert now.since(THEN) == age
    assert ClockTranslation.between(THEN, now)(100.0) == 7.0 - age
