"""The outcome that the relay reports if a TLS connection to an engine fails."""

from __future__ import annotations

import errno
import ssl

import pytest
import trio

from kvd.gateway.tunnels import outcome_of
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
