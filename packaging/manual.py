#!/usr/bin/env python3
"""Writes what describes kvd's commands and settings to people and shells, from the same tables.

    packaging/manual.py FOLDER

fills FOLDER with kvd.1, kvd.toml.5, kvd.toml (every setting, commented out) and completions for
bash (kvd), zsh (_kvd) and fish (kvd.fish). kvd must be importable.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvd._version import VERSION
from kvd.cli.main import DESCRIPTION, build_parser
from kvd.config.file import rendered
from kvd.config.parsers import Setting
from kvd.config.settings import SETTINGS

FILE = "/etc/kvd/kvd.toml"


@dataclass(frozen=True)
class Command:
    """One command of the command line, `kvd config show` for example."""

    words: tuple[str, ...]  # config, show
    help: str
    parser: argparse.ArgumentParser

    @property
    def options(self) -> list[argparse.Action]:
        return [
            action
            for action in self.parser._actions
            if action.option_strings and action.help != argparse.SUPPRESS
        ]


def commands(parser: argparse.ArgumentParser, *words: str) -> Iterator[Command]:
    """Yields what can be run, in the order of the help."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            for name, child in action.choices.items():
                inner = list(commands(child, *words, name))
                yield from inner or [Command((*words, name), helps.get(name, ""), child)]


ALL = tuple(commands(build_parser()))


def takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def value_of(action: argparse.Action) -> str:
    """Returns what the help calls an option's value."""
    return str(action.metavar or action.dest.upper())


def choices_of(action: argparse.Action) -> list[str]:
    """Returns the values an option has, as far as its help lists all of them."""
    if not takes_value(action):
        return []
    metavar = value_of(action)
    if action.dest == "log_level":
        return (action.help or "").partition("one of ")[2].partition(" (")[0].split(", ")
    if metavar == "BOOL":
        return ["true", "false"]
    return metavar.split("|") if "|" in metavar and metavar.islower() else []


def is_file(action: argparse.Action) -> bool:
    return takes_value(action) and value_of(action) == "FILE"


# ---- manual pages


def escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("%%", "%")
    return "\\&" + text if text.startswith((".", "'")) else text


def command_page() -> str:
    lines = [header("KVD", 1, "User Commands")]
    lines += [".SH NAME", f"kvd \\- {escaped(DESCRIPTION[:-1])}"]
    lines += [".SH SYNOPSIS"]
    for command in ALL:
        lines += [".B kvd", f".B {escaped(' '.join(command.words))}", ".RI [ option... ]", ".br"]
    lines += [
        ".B kvd \\-\\-version",
        ".SH DESCRIPTION",
        "kvd knows which inference worker holds which part of a prompt in its KV cache and what",
        "every worker is working on. It hears of both from the workers and from routers, and",
        "answers them over HTTP. With neither file, environment nor options it serves all of its",
        "faces on the loopback interface.",
        ".SH COMMANDS",
    ]
    for command in ALL:
        lines += [f".SS kvd {escaped(' '.join(command.words))}"]
        lines += [escaped(command.parser.description or command.help)]
        if command.words[0] == "serve":
            for action in command.options:
                lines += option(action)
        else:
            own = [each for each in command.options if not documented_elsewhere(each, command)]
            lines += [line for action in own for line in option(action)]
        if command.parser.epilog:
            lines += [".PP", escaped(command.parser.epilog)]
    lines += [
        ".SH SIGNALS",
        ".TP",
        "SIGTERM, SIGINT",
        "answers what is under way and ends; a second one ends at once",
        ".TP",
        "SIGHUP",
        "reads the files of settings, tokens, keys, certificates and the fleet again: what",
        ".BR kvd.toml (5)",
        "marks as live changes, and the fleet is as its file says. With a mistake in any of them",
        "nothing changes and one line of the log names it. Without a file the signal is not",
        "caught.",
        ".SH EXIT STATUS",
        ".TP",
        "0",
        "ended by a signal, all answered",
        ".TP",
        "1",
        "could not start, but may later: an address is in use, for example; or a command has not",
        "done what it was to do; one line on standard error says why",
        ".TP",
        "2",
        "wrong command line",
        ".TP",
        "78",
        "could not start, and will not with this configuration; one line on standard error says",
        "why",
        ".TP",
        "130",
        "a second signal",
        ".PP",
        "Those of",
        ".B kvd status",
        "are its own, see there.",
        ".SH ENVIRONMENT",
        "Every setting has a variable, see",
        ".BR kvd.toml (5).",
        "NOTIFY_SOCKET, WATCHDOG_USEC, LISTEN_PID, LISTEN_FDS, LISTEN_FDNAMES and",
        "RUNTIME_DIRECTORY are those of",
        ".BR systemd (1):",
        "a socket belongs to the face that it is named after (indexer, slot\\-tracker, selection,",
        "conductor),",
        "else to the face that is to listen on the same address.",
        ".SH FILES",
        ".TP",
        FILE,
        "the settings of the service",
        ".TP",
        "/etc/kvd/credentials/",
        "files of secrets, which the service reads as /run/credentials/kvd.service/kvd_NAME",
        ".TP",
        "/run/kvd/control",
        "the socket over which",
        ".B kvd reload",
        "asks the service, in RUNTIME_DIRECTORY",
        ".SH SEE ALSO",
        ".BR kvd.toml (5),",
        ".BR systemctl (1)",
    ]
    return "\n".join(lines) + "\n"


def documented_elsewhere(action: argparse.Action, command: Command) -> bool:
    """Whether an option of `kvd config ...` is one of `kvd serve`."""
    return command.words[0] == "config"


def option(action: argparse.Action) -> list[str]:
    names = ", ".join(f"\\fB{escaped(name)}\\fR" for name in action.option_strings)
    value = f" \\fI{escaped(value_of(action))}\\fR" if takes_value(action) else ""
    return [".TP", names + value, escaped(action.help or "")]


def header(title: str, section: int, manual: str) -> str:
    return f'.TH {title} {section} "" "kvd {VERSION}" "{manual}"\n.nh\n.ad l'


def file_page() -> str:
    lines = [header("KVD.TOML", 5, "File Formats")]
    lines += [
        ".SH NAME",
        "kvd.toml \\- settings of kvd",
        ".SH DESCRIPTION",
        "A TOML file of settings, each a key at the top level.",
        '.BR "kvd config check"',
        "says what is wrong with one,",
        '.BR "kvd config show"',
        "what holds and who says so. An option of the command line wins over the environment, that",
        "over the file, the file over the default. Unknown keys are refused.",
        ".PP",
        "Settings marked",
        ".I live",
        "are taken over by a running daemon when it is reloaded; others wait for a restart.",
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
    """Returns a setting's value as a file says it: the default, or what it would look like."""
    if setting.default is not None:
        return rendered(setting.default)
    value = setting.metavar.removesuffix(",...")
    if setting.metavar in ("N", "PORT", "TOKENS", "SECONDS", "BYTES", "BLOCKS"):
        return value
    return f'["{value}"]' if setting.many else f'"{value}"'


def remark(setting: Setting) -> str:
    default = "None by default." if setting.default is None else ""
    shape = "" if setting.many or setting.default is None else f"{setting.metavar}."
    return " ".join(filter(None, (shape, default, "Live." if setting.live else "")))


def default_file() -> str:
    lines = [
        "# Settings of kvd. kvd.toml(5) says what they mean, `kvd config check --config FILE` what",
        "# is wrong with a file. Lines that begin with #name show defaults, or what a value looks",
        "# like where there is none. After a change: systemctl reload kvd; settings that are not",
        "# marked as live wait for systemctl restart kvd.",
    ]
    for setting in SETTINGS:
        lines += ["", f"# {sentence(setting.help)} {remark(setting)}".rstrip()]
        lines += [f"#{setting.name} = {written(setting)}"]
    return "\n".join(lines) + "\n"


# ---- completions


def bash() -> str:
    cases = []
    for command in ALL:
        flags = " ".join(name for each in command.options for name in each.option_strings)
        cases.append(f'        "{" ".join(command.words)}") flags="{flags}" ;;')
    values = []
    for name, found in valued().items():
        if is_file(found):
            values.append(f'        {name}) COMPREPLY=($(compgen -f -- "$current")); return ;;')
        elif choices := choices_of(found):
            words = " ".join(choices)
            values.append(
                f'        {name}) COMPREPLY=($(compgen -W "{words}" -- "$current")); return ;;'
            )
        else:
            values.append(f"        {name}) return ;;")
    return BASH.format(
        first=" ".join([*firsts(), "--version", "--help"]),
        second=" ".join(seconds()),
        nested="|".join(nested()),
        cases="\n".join(cases),
        values="\n".join(values),
    )


BASH = """\
# bash completion of kvd

_kvd() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command flags
    COMPREPLY=()
    case $previous in
{values}
    esac
    command=${{COMP_WORDS[1]}}
    case $command in
        {nested}) (( COMP_CWORD > 2 )) && command+=" ${{COMP_WORDS[2]}}" ;;
    esac
    if (( COMP_CWORD == 1 )); then
        flags="{first}"
    else
        case $command in
        {nested}) flags="{second}" ;;
{cases}
        esac
    fi
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
}}

complete -F _kvd kvd
"""


def firsts() -> list[str]:
    return list(dict.fromkeys(command.words[0] for command in ALL))


def nested() -> list[str]:
    return list(dict.fromkeys(command.words[0] for command in ALL if len(command.words) > 1))


def seconds() -> list[str]:
    return [command.words[1] for command in ALL if len(command.words) > 1]


def valued() -> dict[str, argparse.Action]:
    """Returns the options that take a value, by name."""
    return {
        name: action
        for command in ALL
        for action in command.options
        if takes_value(action)
        for name in action.option_strings
    }


def quoted(text: str) -> str:
    """Quotes a text for a shell."""
    return "'" + text.replace("'", "'\\''") + "'"


def described(action: argparse.Action) -> str:
    return (action.help or "").replace("%%", "%")


def zsh() -> str:
    lines = ["#compdef kvd", "", "_kvd() {", "    local -a words_left", "    case $words[2] in"]
    for first in firsts():
        lines += [f"    {first})"]
        if first in nested():
            inner = " ".join(
                quoted(f"{command.words[1]}:{command.help}")
                for command in ALL
                if command.words[0] == first
            )
            lines += [
                "        if (( CURRENT == 3 )); then",
                f"            words_left=({inner})",
                "            _describe action words_left",
                "            return",
                "        fi",
            ]
        command = next(each for each in ALL if each.words[0] == first)
        lines += ["        _arguments -s \\"]
        specs = [spec for action in command.options for spec in zsh_options(action)]
        lines += [f"            {quoted(spec)} \\" for spec in specs]
        lines += ["            '*::'", "        ;;"]
    known = " ".join(quoted(f"{name}:{help_of(name)}") for name in firsts())
    lines += ["    *)", f"        words_left=({known})", "        _describe command words_left"]
    return "\n".join([*lines, "        ;;", "    esac", "}", "", '_kvd "$@"', ""])


def help_of(first: str) -> str:
    """Returns the help of a first word."""
    for action in build_parser()._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action._choices_actions:
                if each.dest == first:
                    return (each.help or "").replace(":", "\\:")
    return ""


def zsh_options(action: argparse.Action) -> list[str]:
    """Returns what zsh is told of an option, once for each of its long names."""
    names = [name for name in action.option_strings if name.startswith("--")]
    said = described(action).replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    if not takes_value(action):
        return [f"{name}[{said}]" for name in names]
    value = value_of(action).replace(":", "\\:").replace("[", "\\[").replace("]", "\\]")
    choices = " ".join(choices_of(action))
    kind = "_files" if is_file(action) else f"({choices})" if choices else " "
    return [f"{name}=[{said}]:{value}:{kind}" for name in names]


def fish() -> str:
    none = "not __fish_seen_subcommand_from " + " ".join(firsts())
    lines = ["# fish completion of kvd", "complete -c kvd -f"]
    for first in firsts():
        lines.append(f"complete -c kvd -n {quoted(none)} -a {first} -d {quoted(help_of(first))}")
    lines.append(f"complete -c kvd -n {quoted(none)} -l version -d {quoted('show the version')}")
    for command in ALL:
        seen = f"__fish_seen_subcommand_from {command.words[0]}"
        if len(command.words) > 1:
            inner = f"{seen}; and not __fish_seen_subcommand_from {' '.join(seconds())}"
            said = f"-a {command.words[1]} -d {quoted(command.help)}"
            lines.append(f"complete -c kvd -n {quoted(inner)} {said}")
            seen += f"; and __fish_seen_subcommand_from {command.words[1]}"
        for action in command.options:
            line = f"complete -c kvd -n {quoted(seen)}"
            for name in action.option_strings:
                line += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
            if is_file(action):
                line += " -r -F"
            elif choices := choices_of(action):
                line += f" -x -a {quoted(' '.join(choices))}"
            elif takes_value(action):
                line += " -x"
            lines.append(f"{line} -d {quoted(described(action))}")
    return "\n".join(lines) + "\n"


FILES = {
    "kvd.1": command_page,
    "kvd.toml.5": file_page,
    "kvd.toml": default_file,
    "kvd": bash,
    "_kvd": zsh,
    "kvd.fish": fish,
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in FILES.items():
        (folder / name).write_text(write())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: {sys.argv[0]} FOLDER")
    main(Path(sys.argv[1]))
