"""Reads what is to be explained: a prompt as POST /select takes it, or a live request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from struct import Struct

from kvd.errors import BadRequest, NotFound
from kvd.faces.common import bodies
from kvd.faces.explain.schemas import CHOICE_MEMBERS
from kvd.faces.selection import choosing
from kvd.faces.selection.handlers import PROMPT_FIELDS, PromptReader
from kvd.faces.selection.members import partition_key
from kvd.faces.selection.prompts import ARRAYS
from kvd.http.messages import Request
from kvd.index.partitions import Partition, State
from kvd.model import PartitionKey
from kvd.selection.requests import PromptLookup, SelectRequest
from kvd.selection.service import Selections
from kvd_core.index.trace import given, hashed, recalled, terms
from kvd_core.ledger.ledger import LiveRequest
from kvd_core.selector.selector import Pool

FIELDS = (*PROMPT_FIELDS, "session_id", *CHOICE_MEMBERS, "request_id")
BLOCK_HASHES, TOKEN_IDS = 0, 2  # positions of the arrays

HASH = Struct("Q")


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """The local hashes of a prompt, as bytes of native 64-bit integers."""

    plain: bytes
    salted: bytes | None  # hashed with the prompt's salt; None if it has no salt
    known: int  # leading blocks whose content is known; later ones cannot be explained

    @property
    def blocks(self) -> int:
        return len(self.plain) // HASH.size


@dataclass(frozen=True, slots=True)
class BookedRequest:
    """A live request."""

    request_id: str
    live: LiveRequest


@dataclass(frozen=True, slots=True)
class ExplainRequest:
    """The body of a request for an explanation."""

    selection: SelectRequest
    lookup: PromptLookup
    # Hashes the prompt in blocks of a size; a live request's is recalled from the partition.
    prompt: Callable[[int, Partition | None], HashedPrompt]
    # Returns local hashes by block size, terms and number of leading blocks, where the terms are
    # what adapter and salt add to the seed. None: the prompt came as hashes.
    rehashed: Callable[[int, tuple[int, int], int], bytes] | None
    own_terms: tuple[int, int]  # of the prompt's own adapter and salt
    booked: BookedRequest | None = None

    @property
    def key(self) -> PartitionKey:
        return self.selection.key


def read(request: Request, state: State, selections: Selections) -> ExplainRequest:
    """Reads a question; raises as /select does, and NotFound if a request is not live."""
    reader = PromptReader(ARRAYS, FIELDS)  # not shared: other bodies are read between slices
    members = bodies.scan(reader, request.body)
    request_id = bodies.optional_text(members, "request_id")
    if request_id is not None:
        if any(members.get(name) is not None for name in ARRAYS):
            raise BadRequest("request_id: a request or a prompt can be explained, not both")
        return of_request(request_id, state, selections)
    # Where prompts share no blocks, a drawn number makes each of them unique. `undrawn` puts the
    # number back: the next selection draws it as if nothing had been explained.
    selections.draws.undrawn(partial(reader.read_prompt, selections))
    session_id = bodies.optional_text(members, "session_id")
    selection = choosing.request_of(
        selections, partition_key(members), members, None, None, 0, session_id, reader.lora_name
    )
    own = terms(reader.lora_name, reader.cache_salt) if reader.by_tokens else (0, 0)
    return ExplainRequest(
        selection,
        reader.put_before,
        partial(_prompt, reader, own),
        partial(_rehashed, reader) if reader.by_tokens else None,
        own,
    )


def _prompt(
    reader: PromptReader, own: tuple[int, int], size: int, partition: Partition | None
) -> HashedPrompt:
    if not reader.by_tokens:
        plain = given(reader, BLOCK_HASHES)
        return HashedPrompt(plain, None, len(plain) // HASH.size)
    adapter, salt = own
    plain = hashed(reader, TOKEN_IDS, size, adapter, 0, eagle=reader.eagle)
    salted = None
    if salt:
        salted = hashed(reader, TOKEN_IDS, size, adapter, salt, eagle=reader.eagle)
    return HashedPrompt(plain, salted, len(plain) // HASH.size)


def _rehashed(reader: PromptReader, block_size: int, terms: tuple[int, int], blocks: int) -> bytes:
    found = hashed(reader, TOKEN_IDS, block_size, *terms, eagle=reader.eagle)
    return found[: blocks * HASH.size]


def of_request(request_id: str, state: State, selections: Selections) -> ExplainRequest:
    """Returns the question about a live request, as if another request had the same prompt.

    A booking has only the sequence hashes of its blocks. Their content is known as far as the index
    has the prompt.
    """
    try:
        key, live = selections.reservations.find(request_id)
    except NotFound:
        raise NotFound(
            f"no live request {request_id}: one that has ended is explained by its prompt"
        ) from None
    candidates = selections.candidates[key]
    sequence = candidates.ledger.hashes(request_id)
    if not sequence:
        raise BadRequest(f"reservation {request_id} has no blocks booked: explain its prompt")

    def prompt(block_size: int, partition: Partition | None) -> HashedPrompt:
        plain = b"" if partition is None else recalled(partition.index, sequence)
        known = max(1, len(plain) // HASH.size)  # a first block's local and sequence hash are equal
        return HashedPrompt(plain + sequence[len(plain) :], None, known)

    def lookup(pool: Pool) -> None:
        plain = prompt(pool.block_size, state.partitions.get(key)).plain
        pool.match(plain, sequence, len(sequence) // HASH.size * pool.block_size)

    selection = SelectRequest(key, candidates.settings)
    return ExplainRequest(selection, lookup, prompt, None, (0, 0), BookedRequest(request_id, live))
