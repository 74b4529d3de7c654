from collections.abc import Callable

BAD_FRAME_COUNT: str
BAD_SEQUENCE: str

def drain(
    socket: int,
    take: Callable[[int, bytes], object],
    refuse: Callable[[str], object],
    max_messages: int,
    budget_ns: int,
) -> bool: ...
