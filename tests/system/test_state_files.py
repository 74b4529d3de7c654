"""State directories that a killed process, or a later version of kvd, has left behind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvd.cli.main import main
from kvd.persistence.directory import journals
from kvd.persistence.frames import FORMAT, MAGIC, Content
from kvd.persistence.reading import frames_of
from tests.support.engines import Engine
from tests.support.kvds import PATIENCE_S, Kvd, book, engine_of, kvd_of, prompt, settle, wait

SLOTS = {"worker_id": 7, "model_name": "m", "block_size": 4, "dp_start": 0, "dp_size": 1}


def newest(kvd: Kvd, name: str) -> Path:
    return journals(kvd.state)[-1][1] if name == "journal" else kvd.state / name


def holds_what_is_cached(kvd: Kvd, engine: Engine) -> None:
    """Waits until the stream is exact, and the index has as many blocks as the engine."""
    wait(lambda: kvd.health() == ("exact", ""))
    wait(lambda: len(kvd.paths()) == len(engine.cache))


@pytest.mark.parametrize("name", ["index", "registrations", "journal"])
def test_a_later_format_is_refused_and_the_other_files_count(tmp_path: Path, name: str) -> None:
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        assert kvd.post("slot-tracker", "/register", SLOTS).status_code == 201
        assert book(kvd, "r1").status_code == 201
        kvd.stop()
        path = newest(kvd, name)
        data = path.read_bytes()
        assert data.startswith(MAGIC + b"%d" % FORMAT)
        path.write_bytes(MAGIC + b"%d" % (FORMAT + 1) + data[len(MAGIC) + 1 :])
        kvd.start()
        kvd.server.wait_logged("state_refused")  # type: ignore[union-attr]
        (line,) = [line for line in kvd.server.stderr.splitlines() if "state_refused" in line]  # type: ignore[union-attr]
        assert f"file={path} " in line
        assert f"cannot read its format '{FORMAT + 1}'" in line
        wait((kvd.state / f"{name}.refused").exists)
        if name == "registrations":
            assert kvd.metric('kvd_state_unrestored_requests{reason="no_rank"}') == 1
            kvd.register(engine)
            assert kvd.post("slot-tracker", "/register", SLOTS).status_code == 201
        # A booking is restored only with its journal and its worker.
        assert book(kvd, "r1").status_code == (200 if name == "index" else 201)
        wait(lambda: engine.store(prompt(500 + engine.seq)) or kvd.health() == ("exact", ""))
        holds_what_is_cached(kvd, engine)
        kvd.stop()


def test_a_journal_without_a_header_is_said(tmp_path: Path) -> None:
    """A process may be killed as it begins a journal; earlier journals still count."""
    with kvd_of(tmp_path) as kvd:
        assert kvd.post("slot-tracker", "/register", SLOTS).status_code == 201
        assert book(kvd, "r1").status_code == 201
        kvd.stop()
        torn = kvd.state / "journal.1000"
        torn.write_bytes(b"")
        assert main(["state", "verify", str(kvd.state)]) == 0
        kvd.start()
        assert f"event=journal_torn file={torn} " in kvd.server.stderr  # type: ignore[union-attr]
        assert book(kvd, "r1").status_code == 200
        kvd.stop()
        for path in kvd.state.glob("journal.*"):
            path.write_bytes(b"")
        assert main(["state", "verify", str(kvd.state)]) == 1


def test_what_was_being_written_when_it_was_killed_is_removed(tmp_path: Path) -> None:
    """Until the rename the old file counts, however much of the new one was written."""
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        kvd.stop()
        for name in ("index", "registrations"):
            data = (kvd.state / name).read_bytes()
            (kvd.state / f"{name}.new").write_bytes(data[: len(data) // 2])
        kvd.start()
        # Right after the start kvd may be writing registrations to a new file.
        wait(lambda: not list(kvd.state.glob("*.new")))
        holds_what_is_cached(kvd, engine)
        assert "state_refused" not in kvd.server.stderr  # type: ignore[union-attr]
        kvd.stop()


def test_a_directory_that_is_removed_is_filled_again(tmp_path: Path) -> None:
    """Nothing is registered any more, yet the next start has the worker.

    The journal follows seconds later, as tests/simulation/test_persistence.py shows.
    """
    with kvd_of(tmp_path) as kvd:
        assert kvd.post("slot-tracker", "/register", SLOTS).status_code == 201
        path = kvd.state / "registrations"
        wait(lambda: path.exists() and frames_of(path, Content.REGISTRATIONS))
        kvd.state.rename(tmp_path / "elsewhere")
        wait(path.exists)
        kvd.kill()
        kvd.start()
        assert [row["worker_id"] for row in kvd.get("slot-tracker", "/workers")] == [7]
        kvd.stop()


@pytest.mark.parametrize("name", ["index", "registrations", "journal"])
def test_one_file_of_before_does_no_harm(tmp_path: Path, name: str) -> None:
    """A kvd that is killed between two renames leaves files of different moments."""
    with engine_of() as engine, kvd_of(tmp_path) as kvd:
        settle(kvd, engine)
        assert kvd.post("slot-tracker", "/register", SLOTS).status_code == 201
        assert book(kvd, "r1").status_code == 201
        kvd.stop()
        before = tmp_path / "before"
        shutil.copytree(kvd.state, before)
        kvd.start()
        holds_what_is_cached(kvd, engine)
        assert book(kvd, "r2").status_code == 201
        assert kvd.post("slot-tracker", "/free", {"model_name": "m", "request_id": "r1"})
        engine.evict(next(iter(engine.cache)))
        engine.store(prompt(77))
        with engine_of() as other:
            kvd.register(other, 2)
            assert other.subscribed.wait(PATIENCE_S)
            other.store(prompt(5))
            wait(lambda: len(kvd.paths(2)) == len(other.cache))
            kvd.stop()
            path = newest(kvd, name)
            shutil.copyfile(
                before / path.name if name != "journal" else journals(before)[-1][1], path
            )
            kvd.start()
            assert "state_refused" not in kvd.server.stderr  # type: ignore[union-attr]
            holds_what_is_cached(kvd, engine)
            assert kvd.matched(prompt(77)) == len(prompt(77))
            assert kvd.matched(prompt(0)) == 0  # evicted since
            if name == "registrations":
                assert kvd.health(2) == ("absent", "")
            kvd.stop()
