from collections.abc import Iterator
from typing import Final, NamedTuple

BOOKED: Final[int]
PREFILLED: Final[int]
ENDED: Final[int]
OUTPUT: Final[int]

class Booked(NamedTuple):
    ledger: int
    request_id: str
    key: str | None
    worker_id: int
    dp_rank: int
    tokens: int
    admitted_at: float
    expected_output_tokens: int | None
    output_blocks: int
    decayed_blocks: int
    fraction: float
    prefill_complete: bool
    hashes: bytes

class Stepped(NamedTuple):
    kind: int
    ledger: int
    request_id: str
    fraction: float | None

class OtherRecord(NamedTuple):
    kind: int
    content: bytes

class Journal:
    def __init__(self, limit: int) -> None: ...
    def put(self, kind: int, content: bytes) -> bool: ...
    def take(self) -> bytes: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def __len__(self) -> int: ...
    @property
    def dropped(self) -> int: ...

def read(records: bytes) -> Iterator[Booked | Stepped | OtherRecord]: ...
def pieces(records: bytes, max_bytes: int, max_records: int) -> Iterator[bytes]: ...
