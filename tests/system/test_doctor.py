"""`kvd doctor` and GET /diagnose of a running daemon: findings, exit codes, tokens, bounds."""

from __future__ import annotations

import io
import json
import socket
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from threading import Event

import pytest

from kvd.cli import doctor
from kvd.cli.main import main
from kvd.faces.common.diagnosis import MAX_DIAGNOSES
from tests.support import http_client
from tests.support.documented import documented
from tests.support.patients import FACES, Patient, running_patient
from tests.support.ports import find_free_port

TOKEN = "0123456789abcdef0123456789abcdef"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    with ExitStack() as opened:
        server, urls = opened.enter_context(running_patient(tmp_path_factory.mktemp("kvd")))
        yield Patient(server, urls, opened)


@pytest.fixture
def binds(patient: Patient) -> list[str]:
    return [f"--{face}-bind={url.removeprefix('http://')}" for face, url in patient.urls.items()]


def test_nothing_is_wrong(patient: Patient, binds: list[str], capsys: Capture) -> None:
    assert main(["doctor", *binds]) == 0
    assert capsys.readouterr() == ("nothing is wrong\n", "")
    assert main(["doctor", "--json", "--no-probe", *binds]) == 0
    assert json.loads(capsys.readouterr().out) == {"findings": []}


def test_a_finding_is_said_by_every_face_and_command(
    patient: Patient, binds: list[str], capsys: Capture
) -> None:
    endpoint = f"tcp://127.0.0.1:{find_free_port()}"
    patient.register(endpoint)
    (expected,) = patient.findings(probe=True)
    assert expected["name"] == "engine_unreachable" and expected["severity"] == "error"
    for face in FACES:
        answer = patient.clients[face].get("/diagnose?probe=1")
        assert answer.json() == {"findings": [expected]}
        assert documented(face).untrue(answer) is None
    assert main(["doctor", "--json", *binds]) == 1
    assert json.loads(capsys.readouterr().out) == {"findings": [expected]}
    assert main(["doctor", *binds]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "error: engine_unreachable: worker 1 rank 0 of m/default",
        f"    found   {endpoint}: Connection refused",
        f"    remedy  {expected['remedy']}",
    ]
    patient.finds("engine_unreachable")  # without a probe, too
    assert main(["status", "--interval=0", *binds]) == 1
    line = "findings      1: engine_unreachable; `kvd doctor` explains them"
    assert line in capsys.readouterr().out.splitlines()
    patient.empty()
    assert main(["doctor", *binds]) == 0


def test_names_are_escaped_that_the_terminal_has_not(
    patient: Patient, binds: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.register(f"tcp://127.0.0.1:{find_free_port()}", model_name="模型")
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "latin-1"))
    assert main(["doctor", *binds]) == 1
    assert b"engine_unreachable: worker 1 rank 0 of \\u6a21\\u578b/default\n" in written.getvalue()
    patient.empty()


def test_any_face_will_do(patient: Patient, binds: list[str], capsys: Capture) -> None:
    away = f"--indexer-bind=127.0.0.1:{find_free_port()}"
    assert main(["doctor", *binds, away]) == 0
    assert capsys.readouterr().err == ""


def test_nobody_can_be_asked(patient: Patient, capsys: Capture) -> None:
    away = [f"--{face}-bind=off" for face in FACES[1:]]
    port = find_free_port()
    assert main(["doctor", f"--indexer-bind=127.0.0.1:{port}", *away]) == 2
    out, error = capsys.readouterr()
    refused = f"kvd: kvd does not answer: indexer 127.0.0.1:{port}: Connection refused"
    assert out == "" and error.startswith(refused)
    assert main(["doctor", "--indexer-bind=off", *away]) == 2
    assert "every face is off" in capsys.readouterr().err


def test_so_many_diagnoses_and_no_more(patient: Patient) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as mute:  # each probe waits for it
        patient.register(f"tcp://127.0.0.1:{mute.getsockname()[1]}")
        url = f"{patient.urls['indexer']}/diagnose?probe=1"

        def ask(_: int) -> int:
            return http_client.get(url, timeout=60).status_code

        with ThreadPoolExecutor(2 * MAX_DIAGNOSES) as pool:
            statuses = Counter(pool.map(ask, range(2 * MAX_DIAGNOSES)))
    assert statuses == {200: MAX_DIAGNOSES, 503: MAX_DIAGNOSES}
    text = patient.clients["indexer"].get("/metrics").text
    assert f"kvd_diagnoses_refused_total {MAX_DIAGNOSES}\n" in text
    patient.empty()


@pytest.mark.parametrize("query", ["probe=2", "probe=yes", "probe=0&probe=1"])
def test_a_parameter_that_is_neither(patient: Patient, query: str) -> None:
    answer = patient.clients["indexer"].get(f"/diagnose?{query}")
    assert answer.status_code == 400 and "`probe`" in answer.json()["error"]


def test_a_token_of_scope_read_is_needed(tmp_path: Path, capsys: Capture) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"ops read {TOKEN}\n")
    (tmp_path / "token").write_text(TOKEN)
    with running_patient(tmp_path, f"--tokens-file={tokens}") as (_, urls):
        url = f"{urls['indexer']}/diagnose"
        assert http_client.get(url).status_code == 401
        bind = f"--indexer-bind={urls['indexer'].removeprefix('http://')}"
        others = [f"--{face}-bind=off" for face in FACES[1:]]
        assert main(["doctor", bind, *others]) == 2
        assert "401" in capsys.readouterr().err
        assert main(["doctor", bind, *others, f"--token-file={tmp_path}/token"]) == 0


class Terminal(io.StringIO):
    """A terminal, as far as a progress line can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.written = Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


def test_people_see_that_it_takes_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with doctor.progress("looking"):
        assert terminal.written.wait(60)
    text = terminal.getvalue()
    assert text.startswith("\r\x1b[Klooking: 0 s") and text.endswith("\r\x1b[K")
