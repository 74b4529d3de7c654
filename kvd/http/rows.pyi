from collections.abc import Sized

from kvd.http.busy_wait import BusyWait
from kvd.http.idle_poll import Pollable

NOTHING: int
ALL: int
SOME: int

def serve_row(pollables: list[Pollable], budget_ns: int, runnable: Sized) -> int: ...
def serve_before(pollables: list[Pollable], budget_ns: int, runnable: Sized) -> int: ...
def serve_between(
    pollables: list[Pollable],
    others: int,
    runnable: Sized,
    awake: BusyWait,
    seconds: float,
    linger_s: float,
    budget_ns: int,
) -> tuple[bool, bool]: ...
