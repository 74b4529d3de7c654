"""Stands in for a registry without registrations, as a catalog of the shared state reads it."""

from __future__ import annotations

from typing import Any


class NoRegistrations:
    """A registry in which nothing is ever registered."""

    changes = 0

    def rows(self) -> Any:
        return iter(())

    router_settings = rows
