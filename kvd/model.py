"""The values that name things everywhere in kvd."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Generic, NamedTuple, ParamSpec

P = ParamSpec("P")

InstanceId = int | str  # unsigned 64-bit on the Dynamo faces, text on the Mooncake one

DEFAULT_TENANT = "default"

# Most partitions (models and tenants) of a face, unless configured otherwise. An empty one costs
# 31 KB in the index, so all of them 500 MB, and 3 KB in the slot tracker. Real fleets have a few
# hundred.
MAX_PARTITIONS = 16_384


# Surrogates stand for bytes that are not UTF-8, or for half a character of JSON.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def is_name(text: str) -> bool:
    """Returns whether a text is fit to be a name: it is Unicode without control characters.

    Names appear in metrics, logs, JSON and listings. A NUL breaks a scrape of Prometheus, escape
    sequences redraw a terminal, and nobody uses either on purpose.
    """
    return _UNFIT.search(text) is None


class PartitionKey(NamedTuple):
    """One model and tenant; a prompt is matched only against workers of its own partition."""

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
        (model_name, tenant_id), instance_id, dp_rank = self
        return f"{model_name}:{tenant_id}/{instance_id}:{dp_rank}"


class Observers(Generic[P]):
    """Functions to call when something happens, in the order in which they subscribed."""

    __slots__ = ("subscribers",)

    def __init__(self) -> None:
        self.subscribers: list[Callable[P, object]] = []

    def subscribe(self, subscriber: Callable[P, object]) -> None:
        self.subscribers.append(subscriber)

    def unsubscribe(self, subscriber: Callable[P, object]) -> None:
        self.subscribers.remove(subscriber)

    def notify(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for subscriber in self.subscribers:
            subscriber(*args, **kwargs)
