"""The prefix tree, a level at a time: GET /branches.

A branch is a chain of blocks that some ranks hold. Its name, such as `9-91c07ad203fe55aa`, is valid
until the tree changes there. It has a hash of tokens, from which no prompt can be read.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import groupby
from typing import Any

from kvd.errors import BadRequest, NotFound
from kvd.faces.common import bodies
from kvd.faces.common.paths import BRANCHES_PATH
from kvd.http.messages import Request, Response
from kvd.http.routes import Route
from kvd.index.partitions import Partition, State
from kvd.model import DEFAULT_TENANT
from kvd_core.index.branches import Branch, branches
from kvd_core.index.prefix_index import TIERS

MAX_BRANCHES = 24  # branches on a page: with their holders at most 1 ms of work
MAX_HOLDERS = 12  # holders listed of a branch on a tier; the others are counted

_NAME = re.compile(r"(\d{1,10})-([0-9a-f]{16})")


def branches_route(state: State) -> Route:
    return Route("GET", BRANCHES_PATH, partial(show, state))


def show(state: State, request: Request) -> Response:
    """Lists the branches below `above`, newest first; without it, the first ones of prompts."""
    wanted = bodies.parameters(request, "block_size", "above", "after")
    partition = _partition(state, wanted)
    above, after = _tree_position(wanted, "above"), _tree_position(wanted, "after")
    try:
        found, more = branches(partition.index, above, after, MAX_BRANCHES)
    except LookupError:
        raise NotFound("this branch is not there any more") from None
    shown = {**partition.key._asdict(), "block_size": partition.block_size}
    return bodies.json_response(shown | {"branches": list(map(_shown, found)), "more": more})


def _partition(state: State, wanted: dict[str, Any]) -> Partition:
    if "model_name" not in wanted:
        raise BadRequest("the parameter `model_name` is missing")
    tenant_id = bodies.alias(wanted, *bodies.TENANT) or DEFAULT_TENANT
    if "block_size" not in wanted:
        return state.partition(wanted["model_name"], tenant_id)
    size = wanted["block_size"]
    if not (size.isascii() and size.isdigit() and len(size) <= 10):
        raise BadRequest("block_size: expected a whole number")
    found = state.sized.get((wanted["model_name"], tenant_id, int(size)))
    if found is None:
        raise NotFound("no blocks of this size for this model and tenant")
    return found


def _tree_position(wanted: dict[str, Any], name: str) -> tuple[int, int] | None:
    """Returns the node and the first hash in a branch's name; None without the parameter."""
    if name not in wanted:
        return None
    found = _NAME.fullmatch(wanted[name])
    if found is None or int(found[1]) >= 2**32:
        raise BadRequest(f"{name}: not the name of a branch")
    return int(found[1]), int(found[2], 16)


def _shown(branch: Branch) -> dict[str, Any]:
    tiers = {}
    for tier, rows in groupby(branch.holders, lambda row: row[0]):
        listed = list(rows)
        tiers[TIERS[tier]] = {
            "count": len(listed),
            "holders": [
                {
                    "worker_id": None if worker_id is None else str(worker_id),
                    "dp_rank": dp_rank,
                    "blocks": blocks,
                }
                for _, worker_id, dp_rank, blocks in listed[:MAX_HOLDERS]
            ],
        }
    return {
        "name": f"{branch.node}-{branch.first:016x}",
        "blocks": branch.blocks,
        "children": branch.children,
        "whole": branch.whole,
        "tiers": tiers,
    }
