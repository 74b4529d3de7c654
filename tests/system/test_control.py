"""`kvd reload`, which `systemctl reload` runs: it ends with the outcome of the reload."""

from __future__ import annotations

import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from kvd.app.control import FOLDER_VARIABLE
from kvd.cli.main import main
from tests.support import http_client
from tests.support.ports import find_free_port
from tests.support.processes import Server
from tests.support.running import running

TOKENS = "operator read 0123456789abcdef\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The service's runtime directory, in the environment of `kvd reload` as systemd sets it."""
    path = tmp_path / "run"
    path.mkdir()
    monkeypatch.setenv(FOLDER_VARIABLE, f"{path}:/elsewhere")
    return path


@contextmanager
def service(folder: Path, text: str = "", host: str = "127.0.0.1") -> Iterator[tuple[Server, Path]]:
    """Runs an indexer with this folder and a credential; yields it and its file of settings."""
    path, credentials, port = folder / "kvd.toml", folder / "credentials", find_free_port()
    path.write_text(text)
    credentials.mkdir()
    environ = {FOLDER_VARIABLE: str(folder), "CREDENTIALS_DIRECTORY": str(credentials)}
    arguments = ("indexer", "--host", host, "--port", str(port), "--config", str(path))
    with running(folder, port, *arguments, environ=environ) as server:
        yield server, path


def test_what_holds_is_said_and_what_waits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(folder) as (_, path):
        assert main(["reload"]) == 0
        assert capsys.readouterr().out == "reloaded: nothing has changed\n"
        path.write_text('http_idle_s = 5\nlog_format = "json"\nmax_dumps = 3\n')
        assert main(["reload"]) == 0
        assert capsys.readouterr().out == (
            "reloaded: log_format http_idle_s\nrestart needed: max_dumps\n"
        )
        assert stat.S_IMODE((folder / "control").stat().st_mode) == 0o600
    assert not (folder / "control").exists()


def test_what_kvd_refuses_fails_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = folder / "tokens"
    tokens.write_text(TOKENS)
    text = f'tokens_file = "{tokens}"\n'
    with service(folder, text, host="0.0.0.0") as (server, path):

        def refused(text: str) -> str:
            path.write_text(text)
            assert main(["reload"]) == 1
            assert "event=reload_refused" in server.stderr
            printed = capsys.readouterr()
            assert not printed.out and printed.err.startswith("kvd: nothing has changed: "), printed
            return printed.err

        assert refused("log_levle = 1\n").endswith(
            "log_levle: no such setting; did you mean log_level?\n"
        )
        # Only the daemon knows which addresses it has open,
        assert "could use the indexer" in refused("")
        # and only the daemon can read its credentials.
        (folder / "credentials" / "kvd_tokens").write_text("operator read short\n")
        assert "kvd_tokens: line 1, operator: a token must" in refused("")
        assert http_client.get(f"{server.base_url}/workers").status_code == 401


def test_without_a_kvd_to_ask_it_fails(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["reload"]) == 1
    assert capsys.readouterr().err == (
        f"kvd: no kvd answers at {folder}/control: No such file or directory\n"
    )
    with socket.socket(socket.AF_UNIX) as dying:
        dying.bind(str(folder / "control"))
        dying.listen()
        thread = Thread(target=lambda: dying.accept()[0].close())
        thread.start()
        assert main(["reload"]) == 1
        thread.join()
    assert capsys.readouterr().err == "kvd: kvd ended before it reloaded\n"
    monkeypatch.delenv(FOLDER_VARIABLE)
    assert main(["reload"]) == 1
    assert "RUNTIME_DIRECTORY is not set" in capsys.readouterr().err


def test_those_who_leave_or_come_together_harm_nobody(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with service(folder) as (_, path):
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as leaving:
                leaving.connect(str(folder / "control"))
        path.write_text("http_idle_s = 5\n")
        codes = list[int]()
        threads = [Thread(target=lambda: codes.append(main(["reload"]))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert codes == [0] * 5
