"""Shared by the parsers of all commands: error messages, and flags of settings."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from kvd._version import VERSION
from kvd.config import parsers, settings, sources
from kvd.config.errors import StartError
from kvd.config.setting import Setting
from kvd.telemetry import logs
from kvd.wire.urls import masked

EXIT_NOT_DONE = 1
EXIT_USAGE = 2
# Least likeness (difflib) of a mistyped flag to one that is suggested. At the 0.6 of other names,
# --port of `kvd serve` would be taken for --peers.
LIKENESS = 0.7
# What a command writes to standard output, whole or in pieces, and its exit code.
CommandResult = tuple[str | Iterable[str], int]

# The text below the options in the help of commands with settings.
WAYS = (
    "A setting is a flag, such as --indexer-bind, a variable of the environment, KVD_INDEXER_BIND, "
    "or a key of the file, indexer_bind. A flag wins over the environment, and the environment "
    "wins over the file. --help-all shows all flags; docs/configuration.md explains them."
)


class Parser(argparse.ArgumentParser):
    """Reports a fault of a command line in one line that also names the help.

    The usage is not shown: it would not help, as it has no room for dozens of flags.
    """

    shows_all = False  # whether the help shows all options, or the common ones

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        text = logs.plain(masked(message))
        logs.write_error(f"{self.prog}: {text}; see `{self.prog} --help`\n")
        self.exit(EXIT_USAGE)

    def print_help(self, file: object = None) -> NoReturn:
        """Writes the help to standard output and ends; argparse would pass over a failed write."""
        self.exit(write_output(self.format_help(), 0))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown arguments here, in the command's own parser, which names the command."""
        first = next(iter(args or ()), "")
        if first.startswith("-") and first not in self._flags() and self._has_commands():
            # argparse would take the option's value for the command.
            hint = self._suggestion([first]) or "; options belong after the command"
            self.error(f"unrecognized arguments: {first}{hint}")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._suggestion(unknown)}")
        if not hasattr(found, "parser"):  # a command's parser ends before the parsers above it
            found.parser = self
        return found, unknown

    def _has_commands(self) -> bool:
        return any(action.nargs == argparse.PARSER for action in self._actions)

    def _flags(self) -> list[str]:
        return [name for action in self._actions for name in action.option_strings]

    def _suggestion(self, unknown: Iterable[str]) -> str:
        """Returns which flag the first unknown one was meant to be, in brackets."""
        flag = next((each for each in unknown if each.startswith("--")), "").partition("=")[0]
        like = parsers.nearest(flag, self._flags(), LIKENESS)
        return f" (did you mean {like}?)" if like else ""


class VersionAction(argparse.Action):
    """Writes the version and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.exit(write_output(f"kvd {VERSION}\n", 0))


class FullParser(Parser):
    """Shows all options in its help (--help-all), as do the parsers of its commands."""

    shows_all = True


def add_general(parser: Parser) -> None:
    """Adds the options that every command with settings has beside them."""
    # A usage with every flag would fill a screen and hide the common ones.
    parser.usage = "%(prog)s [options]"
    parser.add_argument("--help-all", action="help", help="show all options and exit")
    parser.add_argument(
        "--config",
        type=usage(parsers.parse_path),
        metavar="FILE",
        help=f"TOML file of settings (variable {sources.CONFIG_VARIABLE})",
    )
    parser.set_defaults(command=None, without_effect=())


def add_uncommon(parser: Parser, *names: str, help: str, **options: Any) -> None:
    """Adds an option that only --help-all shows."""
    shown = help if parser.shows_all else argparse.SUPPRESS
    parser.add_argument(*names, help=shown, **options)


def add_settings(
    parser: Parser,
    chosen: Iterable[Setting],
    *shown: str,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Adds the flags of settings, the common ones first, then each group under its title.

    The short help has the common ones and those named in `shown`. The command's own `defaults` are
    shown in place of those of the settings.
    """
    own = defaults or {}
    by_name = {setting.name: setting for setting in chosen}
    for title, group in settings.GROUPS.items():
        found = [by_name[setting.name] for setting in group if setting.name in by_name]
        target = parser if title == settings.COMMON else parser.add_argument_group(title)
        for setting in found:
            is_shown = parser.shows_all or setting.common or setting.name in shown
            default = own.get(setting.name, setting.default)
            add_setting(target, setting, default, is_shown=is_shown)


def add_setting(
    target: argparse._ActionsContainer,
    setting: Setting,
    default: object,
    *,
    is_shown: bool,
) -> None:
    """Adds the flag of a setting; that of a switch needs no value, and has a form --no-..."""
    remarks = []
    if default is not None:
        remarks.append(f"default {str(default).lower() if setting.is_switch else default}")
    elif setting.when_unset:
        remarks.append(f"default: {setting.when_unset}")
    if setting.is_borrowed:
        remarks.append(f"variable {setting.variable}")
    remark = f" ({'; '.join(remarks)})" if remarks else ""
    target.add_argument(
        *setting.flags,
        dest=setting.name,
        type=usage(setting.parse),
        metavar=setting.metavar,
        help=setting.help + remark if is_shown else argparse.SUPPRESS,
        nargs="?" if setting.is_switch else None,
        const=True if setting.is_switch else None,
    )
    if setting.is_switch:
        target.add_argument(
            *(name.replace("--", "--no-", 1) for name in setting.flags),
            dest=setting.name,
            action="store_const",
            const=False,
            help=argparse.SUPPRESS,
        )


def write_output(output: str | Iterable[str], code: int) -> int:
    """Writes a command's output to standard output, and returns its exit code.

    The reader of the output may leave, as `head` does: then nothing more is written. Characters
    that the output's encoding lacks, in a name for example, are escaped.
    """
    if sys.stdout is None:  # closed, as `>&-` does
        logs.complain(StartError("cannot write: standard output is closed"))
        return EXIT_NOT_DONE
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for text in [output] if isinstance(output, str) else output:
            sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stdout.flush()
        return code
    except OSError as error:
        # Otherwise Python would try to write the rest of the text again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            logs.complain(StartError(f"cannot write: {error.strerror}"))
        return EXIT_NOT_DONE


def no_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return {}


def usage(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Wraps a parser of a value so that argparse shows its reason, not only that it failed."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            shown = masked(text), masked(str(error))
            raise argparse.ArgumentTypeError("{!r}: {}".format(*shown)) from None

    return convert
