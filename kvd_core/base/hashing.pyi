from collections.abc import Iterable, Sequence

def local_hashes(
    tokens: Iterable[int],
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> list[int]: ...
def eagle_hashes(
    tokens: Iterable[int],
    block_size: int,
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> list[int]: ...
def local_hash_mm(
    tokens: Iterable[int],
    mm_hashes: Sequence[int],
    lora_name: str | None = None,
    cache_salt: str | None = None,
) -> int: ...
def sequence_hashes(local: Iterable[int]) -> list[int]: ...
