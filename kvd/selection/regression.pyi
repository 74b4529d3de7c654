from collections.abc import Iterable

def fit(
    points: Iterable[tuple[float, float]], narrow: float
) -> tuple[float, float, float] | None: ...
