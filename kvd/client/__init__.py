"""A client of kvd's HTTP APIs, blocking or on trio: docs/client.md.

    clients        Client, AsyncClient: connections, and reservations that are freed
    choices        a reservation, between its booking and its end
    indexer, slot_tracker, selection, conductor, gateway    calls and answers of each face
    common         calls of every face
    selecting      members of the selection service's request bodies
    decisions      the selection service's answers
    picture        answers that `kvd top` shows
    explanation    answers that explain a choice
    calls          makes calls of methods: routes, bodies, types of answers
    exchanges      a call's attempts and pauses, without I/O
    reading        reads JSON into answers
    connecting     addresses, tokens, TLS
    errors         the errors of calls without an answer

The daemon imports nothing of this package, which imports nothing of the daemon but the compiled
hashes.
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
