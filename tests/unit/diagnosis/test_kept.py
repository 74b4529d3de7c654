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


class Hearing:
    """A selection service that is sent bindings of replicas."""

    def __init__(self) -> None:
        self.service = Service(RouterOptions(session_affinity_ttl_s=60))
        affinity = self.service.selections.affinity
        assert affinity is not None
        self.affinity = affinity

    def hear(self, lead_s: float, writer_id: int = 7, later_ns: int = 0) -> None:
        version = Version(int((self.service.now + lead_s) * 1e9) + later_ns, writer_id)
        self.affinity.apply(Bound(M, "s", 1, 0, version))


def test_a_replica_of_the_future_is_noted() -> None:
    here = Hearing()
    for lead_s in (-5.0, 0.0, LEAST_LEAD_S / 2):
        here.hear(lead_s)
    assert here.affinity.lead_s == 0.0
    here.hear(3.0)
    here.service.now += 1
    here.hear(2.5)
    assert here.affinity.lead_s == pytest.approx(2.5)
    assert here.affinity.led_at == here.service.now


def test_a_replica_that_counts_on_from_another_one_is_not_of_the_future() -> None:
    here = Hearing()
    here.hear(3.0)
    noted_at = here.affinity.led_at
    here.service.now += 1
    here.hear(2.0)  # the same binding, sent again
    here.hear(2.0, writer_id=8, later_ns=1)
    here.hear(2.0, writer_id=8, later_ns=5)  # some bindings in between were missed
    assert here.affinity.led_at == noted_at
