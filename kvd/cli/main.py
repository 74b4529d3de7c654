"""The command line: flags in, one daemon out, an exit code back.

Exit codes: 0 done, 1 not done, 2 the command line is wrong (unknown flag, bad number). A daemon
that cannot start ends with 78 (EX_CONFIG) if it never will with the same configuration, else with
1; one line on stderr says why. Some commands have codes of their own:

    kvd status    0 all streams exact, 1 some are not, 2 a face does not answer or cannot be asked
    kvd doctor    0 nothing is wrong, 1 there are findings, 2 no face could be asked
    kvd explain   0 explained, 1 the question is wrong, 2 no face could be asked
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from kvd.cli import asking, serving
from kvd.cli.options import (
    EXIT_NOT_DONE,
    CommandResult,
    FullParser,
    Parser,
    VersionAction,
    add_general,
    add_settings,
    no_settings,
    usage,
    write_output,
)
from kvd.cli.settings_page import render_page
from kvd.config import load as config
from kvd.config import parsers, secret_files, settings, sources
from kvd.config.errors import StartError
from kvd.config.file import render
from kvd.platform.descriptors import open_standard_streams
from kvd.telemetry import logs
from kvd.wire.egress import EgressPolicy

log = logs.get_logger(__name__)

DESCRIPTION = (
    "Knows which inference engine has cached which prompt, and sends each request there, or "
    "answers your own router."
)
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse itself exits 2 on a usage error."""
    open_standard_streams()
    arguments = sys.argv[1:] if argv is None else argv
    # Building the options of all other commands would take most of the parser's time.
    known = arguments[0] if arguments and arguments[0] in COMMANDS else None
    kind = FullParser if "--help-all" in arguments else Parser
    args = build_parser(kind, known).parse_args(arguments)
    try:
        given = {sources.CONFIG: args.config, **args.given(args.parser, args)}
        if args.command is not None:
            return write_output(*args.command(given))
        loaded = load_config(given)
        logs.setup(loaded.log_level, loaded.log_format)
        for option, why in (*args.without_effect, *_unused(loaded)):
            log.warning("option_without_effect", option=option, reason=why)
        from kvd.app.processes import run  # here, because only a daemon needs to load it
        from kvd.config.reload import ConfigReader

        try:
            return run(loaded, ConfigReader(given, os.environ))
        finally:
            logs.finish()
    except StartError as error:
        logs.complain(error)
        return error.exit_code if args.command is None else EXIT_NOT_DONE
    except KeyboardInterrupt:  # before the daemon took the signal over
        return EXIT_INTERRUPTED


def build_parser(kind: type[Parser] = Parser, command: str | None = None) -> Parser:
    """Returns the parser of all commands, or of the named one alone."""
    parser = kind(
        "kvd",
        description=DESCRIPTION,
        epilog="`kvd COMMAND --help` shows the options of a command. `kvd serve` needs none: it "
        "listens on the loopback interface.",
    )
    parser.add_argument(
        "--version", action=VersionAction, nargs=0, help="show program's version number and exit"
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, add in COMMANDS.items():
        if command in (None, name):
            add(commands)
    return parser


def add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="check or show the configuration")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for action, run, help in (
        (
            "check",
            check_config,
            "check the settings that `kvd serve` would use and report the first error",
        ),
        ("show", show_config, "write all settings as a file, each with its source"),
    ):
        one = actions.add_parser(
            action,
            help=help,
            description=f"{help[0].upper()}{help[1:]}. Takes the flags of `kvd serve`.",
        )
        add_general(one)
        add_settings(one, settings.SETTINGS)
        one.set_defaults(given=serving.serve_settings, command=run)
    add_config_docs(actions)


def add_config_docs(actions: Any) -> None:
    docs = actions.add_parser(
        "docs",
        help="write the tables of docs/configuration.md",
        description="Writes the tables of docs/configuration.md, in Markdown.",
    )
    docs.set_defaults(given=no_settings, config=None, command=write_docs)


def load_config(given: Mapping[str, object]) -> config.Config:
    """Returns the daemon's configuration; raises StartError if it would refuse a file."""
    loaded = config.load(given, os.environ)
    if loaded.fleet_file is not None:
        from kvd.fleet_file import parse  # here, because only a fleet file needs it

        with sources.reading(loaded.fleet_file, "fleet_file"):
            parse.load(loaded.fleet_file, EgressPolicy(loaded.outgoing_allow))
    return loaded


def _unused(loaded: config.Config) -> tuple[tuple[str, str], ...]:
    """Returns variables and settings that have no effect, each with the reason."""
    return (*sources.without_effect(os.environ), *config.unused(loaded))


def write_docs(given: Mapping[str, object]) -> CommandResult:
    return "\n".join(render_page()) + "\n", 0


def check_config(given: Mapping[str, object]) -> CommandResult:
    loaded = load_config(given)
    if loaded.tls is not None:
        from kvd.app.api_server import read_files  # here, because only TLS needs it

        read_files(loaded.tls)
    for path in secret_files.exposed(loaded.values):
        logs.complain(f"warning: every user can read the secret file {path}")
    for option, why in _unused(loaded):
        logs.complain(f"warning: {option} has no effect: {why}")
    return "ok\n", 0


def show_config(given: Mapping[str, object]) -> CommandResult:
    load_config(given)
    held = sources.resolve(given, os.environ)
    return render({name: (setting.value, setting.source) for name, setting in held.items()}), 0


def add_state(commands: Any) -> None:
    parser = commands.add_parser("state", help="show, verify or export a state directory")
    actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
    for action, help in (
        ("show", "show what each file of a state directory holds"),
        ("verify", "read each file of a state directory whole; exit code 1 if one is damaged"),
        ("export", "write a state directory as one JSON object"),
    ):
        one = actions.add_parser(
            action,
            help=help,
            description=f"{help[0].upper()}{help[1:]}. The daemon may be running: files are "
            "replaced whole, and a journal may end in the middle of a write.",
        )
        one.add_argument(
            "folder",
            type=usage(parsers.parse_path),
            metavar="DIR",
            help="state directory, as in the setting state_dir",
        )
        one.set_defaults(given=state_options, config=None, command=partial(read_state, action))


def state_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return {"folder": args.folder}


def read_state(action: str, given: Mapping[str, object]) -> CommandResult:
    from kvd.cli import state  # here, because no other command needs it

    actions = {"show": state.show, "verify": state.verify, "export": state.export}
    return actions[action](cast("Path", given["folder"]))


def add_replay(commands: Any) -> None:
    from kvd.cli import replay

    parser = commands.add_parser(
        "replay",
        help="replay recorded requests under other routing policies",
        description=replay.DESCRIPTION,
        epilog=replay.EPILOG,
    )
    parser.usage = "%(prog)s [options] TRACE"
    replay.add_options(parser, usage)
    parser.set_defaults(given=replay_options, config=None, command=replay.run)


def replay_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return {"options": args}


COMMANDS: dict[str, Callable[[Any], None]] = {  # in the order of the help
    "gateway": serving.add_gateway,
    "serve": serving.add_serve,
    "indexer": serving.add_indexer,
    "slot-tracker": serving.add_slot_tracker,
    "select-service": serving.add_select_service,
    "conductor": serving.add_conductor,
    "config": add_config,
    "status": asking.add_status,
    "doctor": asking.add_doctor,
    "explain": asking.add_explain,
    "top": asking.add_top,
    "reload": asking.add_reload,
    "state": add_state,
    "replay": add_replay,
}
