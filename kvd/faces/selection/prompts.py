"""Prompts in bodies: hashes, or tokens to be hashed."""

from __future__ import annotations

from typing import Any

from kvd.errors import BadRequest
from kvd.faces.common import bodies
from kvd.faces.common.bodies import flag, optional_flag
from kvd.faces.selection.members import optional_object
from kvd.faces.selection.plain import PlainPrompt
from kvd.selection.requests import Look
from kvd.selection.service import Selections
from kvd_core.json.scan import BodyScanner
from kvd_core.selector.selector import MAX_ISL_TOKENS, Pool

# Positions of the arrays of a prompt.
BLOCK_HASHES, SEQUENCE_HASHES, TOKEN_IDS = range(3)
PROMPT: dict[str, Any] = {
    "block_hashes": "hash64?",
    "sequence_hashes": "hash64?",
    "token_ids": "u32?",
}
ASK = BodyScanner(PROMPT, PlainPrompt.FIELDS)
# Its own, for prompts that have waited: the others may hold a body that is about to be looked at.
LATER = BodyScanner(PROMPT, ())


def look_for(selections: Selections, scanner: BodyScanner, members: bodies.Members) -> Look:
    """Returns what puts the body's prompt before a pool; raises BadRequest without a whole one."""
    if "token_ids" in members:
        return _look_tokens(selections, scanner, members)
    optional_flag(members, "is_eagle")  # they are hashed already, as one or the other
    for name in ("block_hashes", "sequence_hashes", "isl_tokens"):
        if members.get(name) is None:
            raise BadRequest(f"{name} is required, or token_ids")
    isl_tokens = bodies.uint(members, "isl_tokens", MAX_ISL_TOKENS)
    if isl_tokens == 0:
        raise BadRequest("isl_tokens must be greater than 0")
    _check_lengths(members)
    return lambda pool: pool.look_body(scanner, BLOCK_HASHES, SEQUENCE_HASHES, isl_tokens)


def look_later(selections: Selections, members: bodies.Members, body: bytes) -> Look | None:
    """Returns what looks at the body's tokens once more, by any block size; None without any."""
    if "token_ids" not in members:
        return None
    look = _look_tokens(selections, LATER, members)

    def again(pool: Pool) -> None:
        LATER.scan(body)
        look(pool)

    return again


def _check_lengths(members: bodies.Members) -> None:
    blocks, hashes = members["block_hashes"], members["sequence_hashes"]
    if blocks != hashes:
        raise BadRequest(f"block_hashes length {blocks} must match sequence_hashes length {hashes}")


def _look_tokens(selections: Selections, scanner: BodyScanner, members: bodies.Members) -> Look:
    lora_name = bodies.optional_text(members, "lora_name")
    cache_salt = bodies.optional_text(members, "cache_salt")
    unique = _unique(selections, members)
    eagle = optional_flag(members, "is_eagle")

    def look(pool: Pool) -> None:
        pool.look_tokens(scanner, TOKEN_IDS, lora_name, cache_salt, unique, eagle=eagle)

    return look


def _unique(selections: Selections, members: bodies.Members) -> int | None:
    """Returns a number for a prompt that is not to share blocks in use with any other."""
    reuse = selections.options.assumes_kv_reuse
    override = optional_object(members, "router_config_override")
    if override is not None and override.get("assume_kv_reuse") is not None:
        reuse = flag(override, "assume_kv_reuse")
    return None if reuse else selections.draws.next()


def look_reserved(
    selections: Selections, scanner: BodyScanner, members: bodies.Members
) -> tuple[Look, int]:
    """Returns what looks at a prompt of which only the sequence hashes are needed; its tokens."""
    if "token_ids" in members:
        return _look_tokens(selections, scanner, members), members["token_ids"]
    for name in ("sequence_hashes", "isl_tokens"):
        if members.get(name) is None:
            raise BadRequest(f"{name} is required, or token_ids")
    isl_tokens = bodies.uint(members, "isl_tokens", MAX_ISL_TOKENS)
    locals_ = SEQUENCE_HASHES
    if "block_hashes" in members:
        _check_lengths(members)
        locals_ = BLOCK_HASHES

    def look(pool: Pool) -> None:
        pool.look_body(scanner, locals_, SEQUENCE_HASHES, isl_tokens)

    return look, isl_tokens
