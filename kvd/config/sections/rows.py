"""`section`, which gives rows their names and defaults, and rows of the usual types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from typing import Any

from kvd.config import parsers
from kvd.config.setting import Setting
from kvd.selection.options import RouterOptions
from kvd_core.selector.settings import Settings

I32_MAX = 2**31 - 1  # libzmq's bounds are of this type
DYN = "DYN_"  # the prefix of variables of Dynamo's router

# Other rows name their parser and the form of their value.
count = partial(Setting, parsers.within(1, I32_MAX), "N")
file = partial(Setting, parsers.parse_path, "FILE")
pause = partial(Setting, parsers.parse_pause, "SECONDS")
seconds = partial(Setting, parsers.parse_seconds, "SECONDS")
switch = partial(Setting, parsers.parse_switch, "BOOL")


def section(
    options_class: type | None = None, prefix: str = "", **rows: Setting
) -> tuple[Setting, ...]:
    """Returns the settings, each with its name.

    If `options_class` has a member with the name in a setting's `field`, or with its name without
    `prefix`, the setting sets that member, and takes its default unless the row has one.
    """
    made = []
    for name, row in rows.items():
        row_class = row.options_class or options_class
        field = row.field or name.removeprefix(prefix)
        defaults = {} if row_class is None else _defaults(row_class)
        if field in defaults:
            default = defaults[field] if row.default is None else row.default
            row = replace(row, options_class=row_class, field=field, default=default)
        made.append(replace(row, name=name))
    return tuple(made)


def _defaults(of: type) -> Mapping[str, Any]:
    if of is Settings:
        return RouterOptions().settings.members
    return {each.name: each.default for each in fields(of)}
