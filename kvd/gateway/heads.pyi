from collections.abc import Iterable
from typing import NamedTuple

from kvd.http.messages import Headers
from kvd.http.relayed import RelayedRequest

KEY_HEADERS: frozenset[bytes]

class EngineHead(NamedTuple):
    status: int
    lines: bytes
    length: int | None

def request_id_of(headers: Headers, made: str) -> bytes: ...
def request_head(
    method: str,
    target: bytes,
    headers: Headers,
    authority: bytes,
    length: int,
    request_id: bytes,
    more: Iterable[tuple[bytes, bytes]] = (),
    without: frozenset[bytes] = ...,
) -> bytes: ...
def credentials(request: RelayedRequest, key: bytes) -> tuple[Headers, frozenset[bytes]]: ...
def own_head(method: str, path: str, authority: bytes, length: int, key: bytes = b"") -> bytes: ...
def read_head(head: bytes) -> EngineHead: ...
def rendered(headers: Headers) -> bytes: ...
