"""GET /diagnose of every face."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.common.paths import DIAGNOSE_PATH
from kvd.http.messages import Request, Response
from kvd.http.routes import ConcurrencyLimit, Route

if TYPE_CHECKING:
    from kvd.diagnosis.doctor import Doctor

# Diagnoses at a time, over all faces: each walks over all streams, and may probe engines.
MAX_DIAGNOSES = 4

PROBES = {"": False, "0": False, "1": True}


async def diagnose(doctor: Doctor, request: Request) -> Response:
    """Answers all findings, in the order of the chain; with `?probe=1` it probes engines."""
    given = parse_qs(request.query.decode("latin-1"), keep_blank_values=True).get("probe", [""])
    if given[-1] not in PROBES or len(given) > 1:
        raise BadRequest("the parameter `probe` is 0 or 1")
    found = await doctor.examine(probes=PROBES[given[0]])
    return bodies.json_response({"findings": [each._asdict() for each in found]})


def diagnose_route(doctor: Doctor, diagnoses: ConcurrencyLimit) -> Route:
    return Route("GET", DIAGNOSE_PATH, partial(diagnose, doctor), admission=diagnoses)


def diagnoses_bound() -> ConcurrencyLimit:
    """Returns the limit on diagnoses that all faces of a process share."""
    refusal = f"the limit of {MAX_DIAGNOSES} concurrent diagnoses is reached"
    return ConcurrencyLimit(MAX_DIAGNOSES, refusal)
