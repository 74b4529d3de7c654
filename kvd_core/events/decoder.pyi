from typing import NamedTuple

REASONS: tuple[str, ...]

class Batch(NamedTuple):
    begun: bool
    rank: int | None
    events: list[dict[str, object]]
    bad: list[str]
    framed: int
    ignored: int

def decode(payload: bytes) -> Batch: ...
def publisher(payload: bytes) -> bytes: ...
