"""The values that name things everywhere in kvd."""

from __future__ import annotations

from typing import NamedTuple

InstanceId = int | str  # unsigned 64-bit on the Dynamo faces, text on the Mooncake one

DEFAULT_TENANT = "default"

# Models and tenants that a face knows, unless it is told otherwise: empty ones cost 31 KB in the
# index, 640 MB in all, and 3 KB in the slot tracker. Real fleets have some hundred.
MAX_PARTITIONS = 16_384


class PartitionKey(NamedTuple):
    """Workers see each other's prompts only within one model and tenant."""

    model_name: str
    tenant_id: str

    def __str__(self) -> str:
        return f"{self.model_name}:{self.tenant_id}"


class RankKey(NamedTuple):
    """One registered event stream: a data-parallel rank of an instance in a partition."""

    partition: PartitionKey
    instance_id: InstanceId
    dp_rank: int

    def __str__(self) -> str:
        return f"{self.partition}/{self.instance_id}:{self.dp_rank}"
