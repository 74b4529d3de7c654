from collections.abc import Mapping

from kvd_core.lane import Answerer
from kvd_core.scan import BodyScanner

FIELDS: tuple[str, ...]

class PlainHoldings(Answerer):
    def __init__(
        self,
        scanner: BodyScanner,
        partitions: Mapping[tuple[str, str, int], object],
        tenant: str,
    ) -> None: ...
