"""How TLS connections to engines end: in which ways they fail, and what is no proper end."""

from __future__ import annotations

import errno
import ssl

import pytest
import trio

from kvd.gateway.tunnels import UpstreamTls, outcome_of
from kvd_core.relay.relay import ExchangeOutcome


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (trio.TooSlowError(), ExchangeOutcome.CONNECT_TIME),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), ExchangeOutcome.UNREACHABLE),
        (OSError(errno.EHOSTUNREACH, "no route"), ExchangeOutcome.UNREACHABLE),
        (OSError(errno.EMFILE, "too many open files"), ExchangeOutcome.NO_ROOM),
        (OSError(errno.EADDRNOTAVAIL, "no port"), ExchangeOutcome.NO_ROOM),
        (ssl.SSLCertVerificationError("self-signed"), ExchangeOutcome.NO_ANSWER),
        (trio.BrokenResourceError(), ExchangeOutcome.NO_ANSWER),
    ],
)
def test_a_failure_is_what_it_would_be_without_tls(
    error: Exception, outcome: ExchangeOutcome
) -> None:
    assert outcome_of(error) is outcome


def test_only_a_close_notify_ends_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian 12's Python makes contexts that take bytes that just stop for a proper end."""
    make = ssl.create_default_context

    def make_as_debian(cafile: None) -> ssl.SSLContext:
        context = make(cafile=cafile)
        context.options |= ssl.OP_IGNORE_UNEXPECTED_EOF
        return context

    monkeypatch.setattr(ssl, "create_default_context", make_as_debian)
    assert not UpstreamTls().context().options & ssl.OP_IGNORE_UNEXPECTED_EOF
