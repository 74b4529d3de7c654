"""The models and tenants that this process serves, and the owners of the others.

A fleet that is too large for one kvd is divided by model and tenant, because two of these share
neither blocks nor load. Settings say what each kvd serves, and may say which kvd serves the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType

from kvd.errors import Misdirected
from kvd.model import is_name
from kvd.telemetry.metrics import Family, counter

# Unregistered models and tenants that are remembered because requests named them; the least
# recently named is forgotten first. Mistaken clients name a few, those that try out names many.
MAX_UNKNOWN = 64
MAX_UNKNOWN_CHARACTERS = 256  # of such a name; nobody writes longer names by mistake

ServedKey = tuple[str, str | None]  # model, tenant; None means every tenant of the model


class ServedModels:
    """The models that this process serves; all by default."""

    def __init__(
        self,
        served: Collection[ServedKey] = (),
        owners: Mapping[ServedKey, str] = MappingProxyType({}),
    ) -> None:
        """An empty `served` means everything; `owners` has the addresses of other processes."""
        self._served = frozenset(served)
        self._owners = owners
        self._others: Mapping[str, Collection[ServedKey]] = {}  # what others announce, by address
        self.misdirected = 0  # requests and registrations that belong elsewhere
        self.unknown: dict[tuple[str, str], int] = {}  # requests by unregistered model and tenant
        self.forgotten = 0  # entries of `unknown` dropped at the limit

    @property
    def listed(self) -> list[ServedKey]:
        """The models and tenants that are served here, sorted; an empty list means everything."""
        return sorted(self._served, key=lambda partition: (partition[0], partition[1] or ""))

    def serves(self, partition: tuple[str, str]) -> bool:
        """Returns whether a model and tenant are served here. O(1)."""
        return not self._served or not self._served.isdisjoint((partition, (partition[0], None)))

    def owner(self, partition: tuple[str, str]) -> str | None:
        """Returns the address at which a model and tenant are served, None if it is unknown."""
        every_tenant = (partition[0], None)
        if address := self._owners.get(partition) or self._owners.get(every_tenant):
            return address
        for address, serves in self._others.items():
            if partition in serves or every_tenant in serves:
                return address
        return None

    def note_others(self, others: Mapping[str, Collection[ServedKey]]) -> None:
        """Notes which models other processes announce that they serve, by address."""
        self._others = others

    def check(self, partition: tuple[str, str]) -> None:
        """Raises Misdirected for a model and tenant that are served elsewhere."""
        if not self.serves(partition):
            raise self.elsewhere(partition)

    def elsewhere(self, partition: tuple[str, str]) -> Misdirected:
        """Returns the error for a model and tenant that are served elsewhere, and counts it."""
        self.misdirected += 1
        model_name, tenant_id = partition
        return Misdirected(
            f"model={model_name} tenant_id={tenant_id} is not served here", self.owner(partition)
        )

    def note_unknown(self, partition: tuple[str, str]) -> None:
        """Counts a request about a model and tenant that are served here and not registered."""
        if not all(len(each) <= MAX_UNKNOWN_CHARACTERS and is_name(each) for each in partition):
            return
        # Moves it to the end: the least recently named is first.
        self.unknown[partition] = self.unknown.pop(partition, 0) + 1
        if len(self.unknown) > MAX_UNKNOWN:
            del self.unknown[next(iter(self.unknown))]
            self.forgotten += 1

    def families(self) -> Iterator[Family]:
        """Yields the families of /metrics."""
        help = "Number of requests and registrations for models that this process does not serve"
        yield counter("kvd_misdirected_total", help, self.misdirected)
        help = "Number of unknown (model, tenant) pairs forgotten at the limit"
        yield counter("kvd_unknown_models_forgotten_total", help, self.forgotten)


EVERYTHING = ServedModels()
