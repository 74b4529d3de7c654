"""`Setting`: one row of the settings, and what follows from it for flags, variables and files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvd.config.parsers import (
    Parse,
    parse_host,
    parse_name,
    parse_path,
    parse_server_name,
    parse_switch,
)

ENV_PREFIX = "KVD_"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting: how a text becomes its value, and its default.

    With an `options_class`, the setting sets its member `field`. Else it sets the field of `Config`
    with the setting's name, or `kvd.config.load` makes another field of it. An OFF becomes None
    there.
    """

    parse: Parse
    metavar: str  # the unit or form of the value
    help: str
    default: Any = None
    when_unset: str = ""  # what a default of None means, for help and documentation
    live: bool = False  # whether a reload changes it in a running daemon
    common: bool = False  # whether the short help shows it
    also: str | None = None  # another name of its flag
    env: str = ENV_PREFIX  # its variable, or the prefix of its name, which ends in _
    also_env: tuple[str, ...] = ()  # further variables
    empty_is_wrong: bool = False  # whether an empty variable is an error; else it counts as unset
    default_env: str | None = None  # a variable of systemd that gives the default
    options_class: type | None = None  # has the member that it sets; None: `Config`
    field: str = ""
    name: str = ""  # given by the table

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        return (self.flag,) if self.also is None else (self.flag, self.also)

    @property
    def is_switch(self) -> bool:
        """Returns whether its flag can also stand alone, or as --no-...."""
        return self.parse is parse_switch

    @property
    def is_text(self) -> bool:
        """Returns whether its value is a text that must not be read as a number."""
        return self.parse in (str, parse_name, parse_path, parse_host, parse_server_name)

    @property
    def many(self) -> bool:
        """Returns whether it takes several values, which a flag separates by commas."""
        return self.metavar.endswith(",...")

    @property
    def listed(self) -> bool:
        """Returns whether a file may give it as an array."""
        return ",..." in self.metavar

    @property
    def variable(self) -> str:
        return self.env + self.name.upper() if self.env.endswith("_") else self.env

    @property
    def variables(self) -> tuple[str, ...]:
        """All variables that are read, its own first."""
        return (self.variable, *self.also_env)

    @property
    def is_borrowed(self) -> bool:
        """Returns whether other programs of the fleet read its variable as well."""
        return not self.variable.startswith(ENV_PREFIX)
