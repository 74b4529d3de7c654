"""Routes that show what is known, and choose nobody."""

from __future__ import annotations

from kvd.faces.common import bodies
from kvd.faces.selection.choosing import settings_of
from kvd.faces.selection.members import OK, place
from kvd.faces.selection.prompts import ASK, look_for
from kvd.http.types import Request, Response
from kvd.selection.candidates import schedulable
from kvd.selection.service import Selections
from kvd_core.selector.selector import Pool


def health(request: Request) -> Response:
    """Answers as long as the daemon lives, whatever it knows."""
    return Response(200, OK)


def loads(request: Request, *, selections: Selections) -> Response:
    """Says what every rank works on, and what waits, by model and tenant."""
    return Response(200, selections.render_loads(*bodies.filters(request)))


def potential_loads(request: Request, *, selections: Selections) -> Response:
    """Says what every rank would be working on with one more prompt."""
    members, pool = _looked(selections, request)
    return Response(200, pool.render_loads(settings_of(selections, members)))


def overlap_scores(request: Request, *, selections: Selections) -> Response:
    """Says how many blocks of a prompt every rank caches."""
    _, pool = _looked(selections, request)
    return Response(
        200,
        b'{"block_size":%d,"num_blocks":%d,"workers":%b,"shared_cache":{"enabled":false,'
        b'"total_hit_blocks":0,"ranges":[],"error":null}}'
        % (pool.block_size, pool.blocks, pool.render_overlaps()),
    )


def _looked(selections: Selections, request: Request) -> tuple[bodies.Members, Pool]:
    members = bodies.scan(ASK, request.body)
    look = look_for(selections, ASK, members)
    pool = schedulable(selections.fleets, place(members)).pool
    look(pool)
    return members, pool
