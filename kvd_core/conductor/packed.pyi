from collections.abc import Mapping

class Unread(bytes): ...

def read_members(
    body: bytes, arrays: Mapping[str, int]
) -> dict[str, int | str | bytes | tuple[str, int] | None]: ...
