#!/usr/bin/env python3
"""Writes kvd's manual pages, completions of its commands, and a file of all settings.

    packaging/manual.py FOLDER

fills FOLDER with kvd.1, completions for bash (kvd), zsh (_kvd) and fish (kvd.fish), all from the
command line; kvd.toml.5 and kvd.toml (every setting, commented out), both from the settings. kvd
and the packages of its extra `package` must be importable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab
from argparse_manpage.manpage import Manpage

from kvd._version import VERSION
from kvd.cli.main import build_parser
from kvd.cli.options import FullParser
from kvd.config.file import rendered
from kvd.config.setting import Setting
from kvd.config.settings import SETTINGS

NAME = "KV-cache index daemon for LLM inference"
INCLUDED = Path(__file__).with_name("kvd.1.include")  # sections not made from the command line


def walk(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields a parser and those of its commands, in the order of the help."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from walk(child)


# ---- manual pages


def command_page() -> str:
    parser = build_parser(FullParser)
    for command in walk(parser):
        for action in command._actions:
            # The section of `kvd serve` describes them.
            if command.prog.startswith("kvd config ") and action.dest != "config":
                action.help = argparse.SUPPRESS
        if command.epilog:  # the library shows an epilog for the whole program only
            command.description = f"{command.description}\n\n{command.epilog}"
            command.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = None
    page = Manpage(parser, format="single-commands-section")
    page.description, page.manual = NAME, "User Commands"
    page.source, page.date = f"kvd {VERSION}", ""
    page.parse_include(str(INCLUDED))
    return paragraphs(str(page))


def paragraphs(page: str) -> str:
    """Returns a page with a paragraph request (.PP) in place of each empty line of its text."""
    lines = page.splitlines()
    found = []
    for line, following in zip(lines, [*lines[1:], "."], strict=True):
        if line:
            found.append(line)
        elif following and not following.startswith("."):
            found.append(".PP")
    return "\n".join(found) + "\n"


def escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def file_page() -> str:
    lines = [
        f'.TH KVD.TOML 5 "" "kvd {VERSION}" "File Formats"',
        ".nh",
        ".ad l",
        ".SH NAME",
        "kvd.toml \\- settings of kvd",
        ".SH DESCRIPTION",
        "A TOML file of settings. Each setting is a key at the top level; other keys are errors.",
        '.B "kvd config check"',
        "reports the first mistake in a file, and",
        '.B "kvd config show"',
        "shows every setting with its source. An option of the command line wins over the",
        "environment, the environment over the file, and the file over the default.",
        ".PP",
        "A running daemon that is reloaded applies the settings marked",
        ".IR live ;",
        "the other settings need a restart.",
        ".SH SETTINGS",
    ]
    for setting in SETTINGS:
        lines += [".TP", f"\\fB{escaped(setting.name)}\\fR = {escaped(written(setting))}"]
        lines += [escaped(f"{sentence(setting.help)} {remark(setting)}")]
        lines += [".br", f"Variable: {escaped(setting.variable)}"]
    lines += [
        ".SH EXAMPLE",
        ".nf",
        *map(escaped, EXAMPLE.splitlines()),
        ".fi",
        ".SH SEE ALSO",
        ".BR kvd (1)",
    ]
    return "\n".join(lines) + "\n"


EXAMPLE = """\
indexer_bind = "127.0.0.1:8090"
selection_bind = "off"
router_temperature = 0.2
peers = ["http://10.0.0.9:8090"]
"""


def sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def written(setting: Setting) -> str:
    """Returns the default of a setting as TOML, or the form of its value."""
    if setting.default is not None:
        return rendered(setting.default)
    value = setting.metavar.removesuffix(",...")
    if setting.metavar in ("N", "PORT", "TOKENS", "SECONDS", "BYTES", "BLOCKS"):
        return value
    return f'["{value}"]' if setting.many else f'"{value}"'


def remark(setting: Setting) -> str:
    default = ""
    if setting.default is None:
        default = f"Default: {setting.when_unset}." if setting.when_unset else "None by default."
    shape = "" if setting.many or setting.default is None else f"{setting.metavar}."
    return " ".join(filter(None, (shape, default, "Live." if setting.live else "")))


def default_file() -> str:
    lines = [
        "# Settings of kvd. kvd.toml(5) explains them; `kvd config check --config FILE` reports",
        "# the first mistake in a file. A line that begins with #name shows the default, or the",
        "# form of the value if the setting has no default. After a change run",
        "# `systemctl reload kvd`; settings that are not marked as live need a restart.",
    ]
    for setting in SETTINGS:
        lines += ["", f"# {sentence(setting.help)} {remark(setting)}".rstrip()]
        lines += [f"#{setting.name} = {written(setting)}"]
    return "\n".join(lines) + "\n"


# ---- completions


# What an argument with one of these placeholders names.
PATHS = dict.fromkeys(("FILE", "PROMPT", "TRACE"), shtab.FILE)
PATHS |= dict.fromkeys(("DIR", "DIR|off"), shtab.DIRECTORY)


def completion(shell: str) -> str:
    parser = build_parser(FullParser)
    for command in walk(parser):
        command.description = None  # it would be shown for a command in place of its short help
        for action in command._actions:
            if (what := PATHS.get(str(action.metavar))) is not None:
                action.complete = what  # type: ignore[attr-defined]
            elif choices := choices_of(action):
                action.choices = choices
            if shell == "zsh" and action.metavar is not None:
                # What follows a bare colon would be run as the command that completes the value.
                action.metavar = str(action.metavar).replace(":", "\\:")
    return str(shtab.complete(parser, shell))


def choices_of(action: argparse.Action) -> list[str]:
    """Returns the values of an option whose help lists all of them."""
    metavar = str(action.metavar)
    if metavar == "BOOL":
        return ["true", "false"]
    return metavar.split("|") if "|" in metavar and metavar.islower() else []


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("kvd.1", command_page()),
        ("kvd.toml.5", file_page()),
        ("kvd.toml", default_file()),
        ("kvd", completion("bash")),
        ("_kvd", completion("zsh")),
        ("kvd.fish", completion("fish")),
    ):
        (folder / name).write_text(text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} FOLDER")
    main(Path(sys.argv[1]))
