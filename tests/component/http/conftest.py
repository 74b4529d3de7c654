"""Runs tests of the front with and without TLS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.serving import TLS


@pytest.fixture(params=["plain", "tls"])
def layers(
    request: pytest.FixtureRequest, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    """Makes `serving` use TLS or not, and returns which."""
    if request.param == "tls":
        monkeypatch.setattr(TLS, "certificates", certificate)
    return str(request.param)
