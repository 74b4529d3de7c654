from collections.abc import Iterable
from typing import NamedTuple

from kvd.http.types import Headers

class EngineHead(NamedTuple):
    status: int
    headers: Headers
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
) -> bytes: ...
def own_head(method: str, path: str, authority: bytes, length: int, key: bytes = b"") -> bytes: ...
def read_head(head: bytes) -> EngineHead: ...
