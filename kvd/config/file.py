"""The configuration file: TOML, each key the name of a setting, nothing else.

    indexer_bind = "0.0.0.0:8090"
    router_temperature = 0.2
    peers = ["http://10.0.0.9:8090"]        # what a flag separates by commas

`render` writes what `read` reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvd.config import toml
from kvd.config.parsers import nearest
from kvd.config.setting import Setting
from kvd.config.settings import SETTINGS
from kvd.wire.urls import masked

MAX_BYTES = 1024 * 1024  # longest configuration file: room for some thousand workers

BY_NAME = {setting.name: setting for setting in SETTINGS}


def read(path: Path) -> dict[str, Any]:
    """Returns the parsed settings of a file.

    Raises OSError, and ValueError with one line that names the key and what is allowed.
    """
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the file is longer than {MAX_BYTES} bytes")
    return {key: _value(key, value) for key, value in toml.parse(data).items()}


def _value(key: str, value: object) -> Any:  # typed by the table's own parse function
    setting = BY_NAME.get(key)
    if setting is None:
        like = nearest(key, BY_NAME)
        raise ValueError(f"{key}: no such setting" + (f"; did you mean {like}?" if like else ""))
    try:
        return setting.parse(_text(setting, value))
    except ValueError as error:
        raise ValueError(f"{key}: {masked(str(error))}") from None


def _text(setting: Setting, value: object) -> str:
    """Returns a value as the text that the setting's flag would have."""
    if setting.many or (setting.listed and isinstance(value, list)):
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ValueError(f"expected an array of {setting.metavar.partition(',...')[0]} texts")
        if any("," in each for each in value):
            raise ValueError("an entry of the array contains a comma")
        return ",".join(value)
    if isinstance(value, bool) and setting.is_switch:
        return str(value).lower()
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and not setting.is_text:
        return str(value)
    raise ValueError(f"expected {setting.metavar}")


def render(values: Mapping[str, tuple[object, str]]) -> str:
    """Returns settings as a file, each with its remark; a value of None is commented out."""
    lines = []
    for name, (value, remark) in values.items():
        line = f"# {name} =" if value is None else f"{name} = {rendered(value)}"
        lines.append(f"{line}  # {remark}\n")
    return "".join(lines)


def rendered(value: object) -> str:
    """Returns a value as TOML."""
    if isinstance(value, tuple):
        return f"[{', '.join(map(rendered, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
