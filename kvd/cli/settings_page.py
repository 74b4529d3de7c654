"""Renders all settings as Markdown: the second half of docs/configuration.md."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.config.setting import ENV_PREFIX, Setting
from kvd.config.settings import GROUPS

TITLE = "## All settings"
HEADER = "| setting | default | |\n|---|---|---|"


def render_page() -> Iterator[str]:
    """Yields the lines of the page from TITLE on."""
    yield TITLE
    for title, settings in GROUPS.items():
        yield f"\n### {title}\n"
        yield HEADER
        yield from map(_row, settings)


def _row(setting: Setting) -> str:
    # Names that do not follow from the setting's.
    others = setting.flags[1:] + tuple(
        each for each in setting.variables if each != ENV_PREFIX + setting.name.upper()
    )
    cells = (
        ", ".join(f"`{name}`" for name in (setting.name, *others)),
        setting.when_unset if setting.default is None else f"`{_default(setting.default)}`",
        f"`{setting.metavar}`: {setting.help}",
    )
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _default(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
