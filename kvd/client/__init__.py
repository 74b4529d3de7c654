"""A client of kvd's HTTP APIs, blocking or on trio: docs/client.md.

    clients        Client, AsyncClient: connections, and reservations that are freed
    choices        a reservation, between its booking and its end
    indexer, slot_tracker, selection, conductor, gateway    calls of each face, and answers
    common         calls of every face
    selecting      members that bodies of the selection service have
    decisions      its answers
    picture        answers that `kvd top` shows
    explanation    answers that explain a choice
    calls          how a method becomes a call: routes, bodies, types of answers
    exchanges      a call's attempts and pauses, without I/O
    reading        JSON to answers
    connecting     addresses, tokens, TLS
    errors         what becomes of a call instead of an answer

The daemon imports nothing of this, and this nothing of the daemon but the compiled hashes.
"""

from __future__ import annotations

from kvd.client.choices import Choice
from kvd.client.clients import AsyncClient, Client
from kvd.client.errors import ClientError, Refused, Unauthorised, Unreachable, WrongAnswer
from kvd_core.base.hashing import eagle_hashes, local_hash_mm, local_hashes, sequence_hashes

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "ClientError",
    "Refused",
    "Unauthorised",
    "Unreachable",
    "WrongAnswer",
    "eagle_hashes",
    "local_hash_mm",
    "local_hashes",
    "sequence_hashes",
]
