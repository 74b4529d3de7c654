"""Failures of prompts in bodies, and matching a prompt again after it has waited."""

from __future__ import annotations

from typing import Any

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.common.bodies import flag
from kvd.faces.selection.members import optional_object
from kvd.selection.service import Selections
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import Pool

# The arrays of a prompt: hashes of blocks, or tokens.
ARRAYS: dict[str, Any] = {
    "block_hashes": "hash64?",
    "sequence_hashes": "hash64?",
    "token_ids": "u32?",
}
# Only for prompts that have waited: the other scanners may hold a body that is being read.
LATER = BodyScanner({"token_ids": "u32?"})


def missing(members: bodies.Members, *names: str) -> BadRequest:
    """Returns the failure of a prompt that has neither tokens nor all of these members."""
    name = next(name for name in names if members.get(name) is None)
    return BadRequest(f"{name} is required, or token_ids")


def empty() -> BadRequest:
    return BadRequest("isl_tokens must be greater than 0")


def of_two_lengths(blocks: int, hashes: int) -> BadRequest:
    return BadRequest(f"block_hashes length {blocks} must match sequence_hashes length {hashes}")


def unique(selections: Selections, members: bodies.Members) -> int | None:
    """Returns a number that makes a prompt unique, so that it shares no blocks in use.

    None if prompts may share blocks, as the settings or the request say.
    """
    reuse = selections.options.assumes_kv_reuse
    override = optional_object(members, "router_config_override")
    if override is not None and override.get("assume_kv_reuse") is not None:
        reuse = flag(override, "assume_kv_reuse")
    return None if reuse else selections.draws.next()


def match_again(
    body: bytes,
    lora_name: str | None,
    cache_salt: str | None,
    unique: int | None,
    eagle: bool,
    pool: Pool,
) -> None:
    """Makes a pool match the tokens of a body once more."""
    LATER.scan(body)
    pool.match_tokens(LATER, 0, lora_name, cache_salt, unique, eagle=eagle)
