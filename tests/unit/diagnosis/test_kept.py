"""Evidence that packages keep for the doctor alone: bounded, and only the latest of each kind."""

from __future__ import annotations

import pytest

from kvd.errors import NotFound
from kvd.http.auth import MAX_HOST_BYTES, AccessPolicy, Authorizer
from kvd.http.errors import Failures
from kvd.index.served_models import MAX_UNKNOWN, MAX_UNKNOWN_CHARACTERS, ServedModels
from kvd.selection.affinity import LEAST_LEAD_S
from kvd.selection.options import RouterOptions
from kvd.wire.affinity import Bound, Version
from tests.support.selecting import M, Service


def asked(served: ServedModels, *places: tuple[str, str]) -> None:
    for place in places:
        Failures(served=served).expected(NotFound("nobody").about(place), [])


def test_models_asked_for_in_vain_are_counted() -> None:
    served = ServedModels()
    asked(served, ("m", "t"), ("n", "t"), ("m", "t"))
    assert served.unknown == {("n", "t"): 1, ("m", "t"): 2}
    asked(served, ("m" * (MAX_UNKNOWN_CHARACTERS + 1), "t"), ("m\n", "t"))
    assert len(served.unknown) == 2


def test_the_model_not_asked_for_the_longest_time_is_forgotten() -> None:
    served = ServedModels()
    asked(served, ("m", "t"), *((f"m{number}", "t") for number in range(MAX_UNKNOWN - 1)))
    asked(served, ("m", "t"), ("another", "t"))
    assert len(served.unknown) == MAX_UNKNOWN and served.forgotten == 1
    assert served.unknown["m", "t"] == 2 and ("m0", "t") not in served.unknown


def test_what_is_served_elsewhere_is_not_unknown() -> None:
    served = ServedModels([("m", None)])
    asked(served, ("n", "t"))
    assert not served.unknown and served.misdirected == 1


@pytest.mark.parametrize(
    ("host", "shown"),
    [
        (b"kv.example", "kv.example"),
        (b"kv.example:8090", "kv.example"),
        (b"kv.example:port", "kv.example:port"),
        (b"x" * 1000, "x" * MAX_HOST_BYTES),
    ],
)
def test_the_last_refused_host_is_kept(host: bytes, shown: str) -> None:
    authorizer = Authorizer(AccessPolicy())
    refusal = authorizer.refusal([(b"host", host)], None, checks_host=True)
    assert refusal is not None and refusal.status == 421
    assert authorizer.refused_host == shown and authorizer.refused["host"] == 1


def test_a_replica_of_the_future_is_noted() -> None:
    service = Service(RouterOptions(session_affinity_ttl_s=60))
    affinity = service.selections.affinity
    assert affinity is not None

    def hear(lead_s: float) -> None:
        version = Version(int((service.now + lead_s) * 1e9), 7)
        affinity.apply(Bound(M, "s", 1, 0, version))

    for lead_s in (-5.0, 0.0, LEAST_LEAD_S / 2):
        hear(lead_s)
    assert affinity.lead_s == 0.0
    hear(3.0)
    service.now += 1
    hear(2.0)
    assert affinity.lead_s == pytest.approx(2.0) and affinity.led_at == service.now
