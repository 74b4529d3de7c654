from enum import IntEnum

MAX_TOKEN_BYTES: int
VERDICTS: tuple[str, ...]

class ClientTrust(IntEnum):
    NEW = 0
    UNKNOWN = 1
    KNOWN = 2

class PermitRules:
    def replace(
        self, tokens: list[tuple[bytes, int]], hosts: list[bytes], origins: list[bytes]
    ) -> None: ...
    def judge(self, headers: list[tuple[bytes, bytes]], scope: int, checks_host: bool) -> int: ...
