from collections.abc import Iterable, Mapping
from typing import Literal

MAX_NESTED_BYTES: int

class BodyScanner:
    def __init__(
        self,
        arrays: Mapping[str, Literal["u32", "hash64", "i64", "u32?", "hash64?", "i64?"]],
        fields: Iterable[str] = (),
        spans: Iterable[str] = (),
        nested_bytes: int | None = MAX_NESTED_BYTES,
    ) -> None: ...
    def scan(self, body: bytes) -> dict[str, object]: ...
    def array(self, name: str) -> list[int]: ...
    def hashes(self) -> bytes: ...
    def __sizeof__(self) -> int: ...
