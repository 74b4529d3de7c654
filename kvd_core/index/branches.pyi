from typing import Final, NamedTuple

from kvd_core.index.prefix_index import PrefixIndex, Worker

ROOT: Final[int]

class Branch(NamedTuple):
    node: int
    first: int
    blocks: int
    children: int
    whole: bool
    holders: list[tuple[int, int | str | None, int | None, int]]

def branches(
    index: PrefixIndex, above: tuple[int, int] | None, after: tuple[int, int] | None, limit: int
) -> tuple[list[Branch], bool]: ...
def holdings(worker: Worker) -> dict[int, tuple[int, ...]]: ...
