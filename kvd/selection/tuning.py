"""Changes by calls to the router settings of models: mode, policy, busy thresholds.

(model, tenant)  ──> changes ─┐
(model, None)    ──> changes ─┼──> Candidates.settings, of requests that override nothing
RouterOptions    ──> settings ┘

A key is a model with a tenant, or a model with all its tenants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kvd.errors import Conflict, NotFound
from kvd.model import PartitionKey
from kvd.selection.candidates import Candidates
from kvd.selection.policies import Policy
from kvd_core.selector.settings import Settings

TuningKey = tuple[str, str | None]  # model, tenant; None means all tenants of the model


class TuningPolicy(NamedTuple):
    """A policy, and the model, or the tenant of a model, for which it is set."""

    key: TuningKey
    policy: Policy


class Tuning:
    """The changed settings, by model and by model and tenant.

    There are no more keys than models and tenants, and entries of the fleet file.
    """

    def __init__(
        self,
        candidates: Mapping[PartitionKey, Candidates],
        settings: Settings,
        on_change: Callable[[], None],
    ) -> None:
        """Calls `on_change` when a worker may have become free for waiting selections."""
        self._candidates = candidates
        self._settings = settings
        self._on_change = on_change
        self.changes = 0  # how often settings have been changed
        self._changes: dict[TuningKey, dict[str, Any]] = {}

    def reload(self, settings: Settings) -> None:
        """Replaces the settings that hold unless a key changes them."""
        self._settings = settings
        for key, candidates in self._candidates.items():
            candidates.settings = self.settings(*key)
        self._on_change()

    def settings(self, model_name: str, tenant_id: str | None) -> Settings:
        """Returns the settings of a model and tenant; None means its tenants without changes."""
        changes = {
            **self._changes.get((model_name, None), {}),
            **self._changes.get((model_name, tenant_id), {}),
        }
        return self._settings.replace(**changes) if changes else self._settings

    def change(
        self, key: TuningKey, changes: Mapping[str, Any], whole: tuple[str, ...] = ()
    ) -> None:
        """Changes settings of a key by name; earlier changes of any of `whole` are dropped first.

        A tenant's own settings win over those of its model. Raises NotFound for a key that has had
        no workers, and ValueError as Settings does; nothing has changed then.
        """
        self._check(key)
        self._change(key, changes, dropped=whole)

    def set_ahead(self, key: TuningKey, changes: Mapping[str, Any]) -> Mapping[str, Any]:
        """Changes settings of a key that may not have had workers yet; returns the changes.

        Raises Conflict if any of them has been set for the key already. The caller bounds the
        number of keys.
        """
        own = self._changes.get(key, {})
        if changes.keys() & own.keys():
            raise Conflict(f"{key[0]}: a client has set it already")
        self._change(key, changes)
        return changes

    def replace(self, key: TuningKey, names: Iterable[str], changes: Mapping[str, Any]) -> None:
        """Makes these changes for a key, and takes back other changes of `names`.

        Raises ValueError as Settings does; nothing has changed then. The caller bounds the number
        of keys.
        """
        self._change(key, changes, dropped=names)

    def has_changes(self, key: PartitionKey) -> bool:
        """Returns whether any settings of a model and tenant are changed."""
        return key in self._changes or (key.model_name, None) in self._changes

    def holds(self, key: TuningKey, changes: Mapping[str, Any]) -> bool:
        """Returns whether all these settings are changed for a key, to exactly these values."""
        own = self._changes.get(key, {})
        return all(name in own and own[name] == value for name, value in changes.items())

    def take_back(self, key: TuningKey, names: Iterable[str]) -> None:
        """Takes back a key's changes of these names; the key may have no workers."""
        self._change(key, {}, dropped=names)

    def _change(
        self, key: TuningKey, changes: Mapping[str, Any], dropped: Iterable[str] = ()
    ) -> None:
        """Drops a key's changes of some names, then makes others; checks these first."""
        self._settings.replace(**changes)
        own = self._changes.pop(key, {})
        for name in dropped:
            own.pop(name, None)
        own.update(changes)
        if own:
            self._changes[key] = own
        self._apply(key[0])

    def forget(self, key: TuningKey, names: tuple[str, ...]) -> None:
        """Takes back a key's changes of these names; raises NotFound as `change` does."""
        self._check(key)
        self.take_back(key, names)

    def all_changes(self) -> list[tuple[TuningKey, dict[str, Any]]]:
        """Returns all changes with their keys."""
        return [(key, dict(changes)) for key, changes in self._changes.items()]

    def changed_keys(self, names: tuple[str, ...]) -> list[TuningKey]:
        """Returns the keys with changes of any of these names, models before their tenants."""
        keys = [key for key, changes in self._changes.items() if changes.keys() & set(names)]
        return sorted(keys, key=_in_order)

    def where_set(self, names: tuple[str, ...]) -> list[TuningKey]:
        """Returns the keys with changes of any of these, and all models if a default is set."""
        keys = set(self.changed_keys(names))
        if any(self._settings.members[name] is not None for name in names):
            keys |= {(key.model_name, None) for key in self._candidates}
        return sorted(keys, key=_in_order)

    def _check(self, key: TuningKey) -> None:
        model_name, tenant_id = key
        if not any(
            key.model_name == model_name and tenant_id in (None, key.tenant_id)
            for key in self._candidates
        ):
            tenant = "" if tenant_id is None else f" tenant_id={tenant_id}"
            failure = NotFound(f"no workers have been registered for model={model_name}{tenant}")
            raise failure if tenant_id is None else failure.about((model_name, tenant_id))

    def _apply(self, model_name: str) -> None:
        self.changes += 1
        for key, candidates in self._candidates.items():
            if key.model_name == model_name:
                candidates.settings = self.settings(*key)
        self._on_change()


def _in_order(key: TuningKey) -> tuple[str, bool, str]:
    model, tenant = key
    return model, tenant is not None, tenant or ""
