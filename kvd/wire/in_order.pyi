from collections.abc import Callable

from kvd.wire.engine_identity import EngineIdentity
from kvd_core.base.recent import Recent

class Taken:
    messages: int
    payload_bytes: int

class Applier:
    def __init__(self, recent: Recent, apply: Callable[[bytes], int]) -> None: ...
    def apply(self, seq: int, payload: bytes) -> bool: ...

class Taker:
    def __init__(self, taken: Taken, applier: Applier, identity: EngineIdentity) -> None: ...
    def take(self, seq: int, payload: bytes) -> bool: ...
