"""Faults in files that the daemon writes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from pathlib import Path

from tests.support.patients import Patient, running_patient


def test_the_state_directory_has_gone(tmp_path: Path) -> None:
    kept = tmp_path / "state"
    with ExitStack() as opened:
        server, urls = opened.enter_context(running_patient(tmp_path, f"--state-dir={kept}"))
        patient = Patient(server, urls, opened)
        assert patient.findings() == []
        shutil.rmtree(kept)
        patient.worker(1, None)  # kvd tries to keep it in the directory
        found = patient.finds("files_not_written", "state directory")
        assert "failed in " in found["evidence"]
