"""A fleet file that is not in force, or not as a whole."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from tests.support.patients import Patient, running_patient


def rank(number: int, block_size: int = 16) -> str:
    return (
        f'[[indexer]]\ninstance_id = {number}\nmodel_name = "m"\nblock_size = {block_size}\n'
        f'endpoint = "tcp://127.0.0.1:1"\n'
    )


def test_a_file_is_refused_and_an_entry_of_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text("")
    with ExitStack() as opened:
        server, urls = opened.enter_context(running_patient(tmp_path, f"--fleet-file={path}"))
        patient = Patient(server, urls, opened)
        assert patient.findings() == []
        path.write_text("[[indexer")
        found = patient.finds("fleet_not_applied", str(path))
        assert found["evidence"].startswith(f"{path}: ")
        patient.register("tcp://127.0.0.1:1")
        path.write_text(rank(1))
        found = patient.finds("fleet_not_applied", f"indexer, entry 1 of {path}")
        assert found["evidence"]
        path.write_text("")
        server.wait_until(lambda: named(patient) == ["engine_unreachable"], "forgotten")


def named(patient: Patient) -> list[str]:
    return [each["name"] for each in patient.findings()]
