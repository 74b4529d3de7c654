from collections.abc import Sequence

class Histogram:
    sum: float
    def __init__(self, bounds: Sequence[float]) -> None: ...
    @property
    def buckets(self) -> list[int]: ...
    def observe(self, value: float) -> None: ...

class EndpointCounts:
    methods: dict[str, int]
    errors: dict[str, int]
    seconds: Histogram

class RequestCounts:
    endpoints: dict[str, EndpointCounts]
    def __init__(self, bounds: tuple[float, ...] = (), unobserved: str = "") -> None: ...
    def observe(self, path: str, method: str, status: int, seconds: float) -> None: ...
