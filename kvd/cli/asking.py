"""The commands that ask a running daemon: their flags, the faces they ask, and their output.

The output of each command is made in a module of its own, which only that command loads.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvd.cli.options import CommandResult, Parser, add_general, add_settings, no_settings, usage
from kvd.config import parsers, secret_files, sources
from kvd.config.errors import StartError
from kvd.config.sections import listening
from kvd.telemetry import logs

if TYPE_CHECKING:
    from kvd.cli.face_client import FaceClient
    from kvd.config.binds import Bind

Command = Callable[[Mapping[str, object]], CommandResult]
AskingCommand = Callable[[Mapping[str, object], "AskedDaemon"], CommandResult]

# Where the addresses of the daemon come from.
ADDRESSES = (
    "The daemon's addresses come from the flags, the environment or the file of settings; without "
    f"--config this is the service's, {sources.SERVICE_FILE}, if it is readable. Without a file "
    f"and an address, a gateway at {listening.DEFAULT_GATEWAY_BIND} is asked, too."
)
FIRST_FACE = f"{ADDRESSES} The first face that answers is asked."


@dataclass(frozen=True, slots=True)
class AskedDaemon:
    """The faces of a daemon, and a client to ask them."""

    faces: dict[str, Bind]
    unnamed: set[str]  # faces whose address nobody has set
    client: FaceClient


def add_status(commands: Any) -> None:
    parser = _add_asking(
        commands,
        "status",
        ("interval", "json"),
        show_status,
        help="report the health of a running daemon",
        description="Reports the health of a running daemon: its registrations, its index, its "
        f"live requests, its rates, and the workers whose event streams are inexact. {ADDRESSES} "
        "Each face is asked. With a gateway, others that have only their default address may be "
        "missing.",
        epilog="Exit codes: 0 all streams are exact, 1 some streams are inexact, a worker cannot "
        "be selected, an engine does not serve or a model never matches, 2 a face does not answer.",
    )
    parser.add_argument(
        "--interval",
        type=usage(parsers.parse_pause),
        default=1.0,
        metavar="SECONDS",
        help="time over which rates are measured (default 1.0)",
    )
    parser.add_argument("--json", action="store_true", help="write the whole report as JSON")


def add_doctor(commands: Any) -> None:
    parser = _add_asking(
        commands,
        "doctor",
        ("json", "no_probe"),
        show_findings,
        help="find out why prompts do not match, and how to mend it",
        description="Asks a running daemon what is wrong between its engines and its choices, and "
        "writes each finding with its evidence and a remedy. The daemon also connects to "
        f"engines to test them, which may take ten seconds. {FIRST_FACE}",
        epilog="Exit codes: 0 nothing is wrong, 1 there are findings, 2 kvd cannot be asked.",
    )
    parser.add_argument(
        "--no-probe", action="store_true", help="do not connect to engines to test them"
    )
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")


def add_explain(commands: Any) -> None:
    parser = _add_asking(
        commands,
        "explain",
        ("prompt", "request", "model_name", "tenant_id", "lora_name", "cache_salt", "json"),
        explain,
        help="explain which worker gets a prompt or a request, and why",
        description="Asks a running daemon which worker it would choose for a prompt, and reports "
        "of each candidate what it caches on each tier, why it caches no more, and the terms of "
        "its cost. PROMPT is a file, - for standard input: token ids, or the body of POST /select "
        f"in JSON. {FIRST_FACE} Nothing is booked.",
        epilog="Exit codes: 0 explained, 1 the prompt or request cannot be explained, 2 kvd cannot "
        "be asked.",
    )
    parser.usage = "%(prog)s [options] PROMPT | --request ID"
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="file with a prompt")
    for name, metavar, help in (
        ("request", "ID", "explain a live booking of the selection service instead"),
        ("model-name", "NAME", "model of the prompt"),
        ("tenant-id", "NAME", "tenant of the prompt"),
        ("lora-name", "NAME", "adapter of the prompt"),
        ("cache-salt", "TEXT", "cache salt of the prompt"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, help=help)
    parser.add_argument("--json", action="store_true", help="write the explanation as JSON")


def add_top(commands: Any) -> None:
    parser = _add_asking(
        commands,
        "top",
        ("interval",),
        watch,
        help="watch a running daemon in the terminal",
        description="Shows live what a running daemon does: rates, streams, workers "
        "with load, hit share and tiers, recent choices. The page /ui of each face shows the same. "
        f"{FIRST_FACE} q and Ctrl-C quit; arrows and space scroll.",
        epilog="Exit codes: 0 quit, 1 there is no terminal, 2 the credentials cannot be read.",
    )
    parser.add_argument(
        "--interval",
        type=usage(parsers.parse_pause),
        default=2.0,
        metavar="SECONDS",
        help="time between two refreshes (default 2.0)",
    )


def add_reload(commands: Any) -> None:
    parser = commands.add_parser(
        "reload",
        help="reload the files of the service and report the outcome",
        description="Makes the kvd that systemd runs reload its files, and reports the outcome. "
        "`systemctl reload kvd` runs this command.",
        epilog="Exit codes: 0 the files are in force, except for settings that need a restart; "
        "1 nothing has changed, and one line gives the reason.",
    )
    parser.set_defaults(given=no_settings, config=None, command=reload)


def _add_asking(
    commands: Any,
    name: str,
    own: Sequence[str],
    command: Command,
    **described: str,
) -> Parser:
    """Adds a command that asks a daemon, with the flags that all such commands have.

    `own` names the values of the flags and arguments that it alone has.
    """
    parser: Parser = commands.add_parser(name, **described)
    add_general(parser)
    add_settings(parser, listening.BIND_SETTINGS)
    parser.add_argument(
        "--token-file",
        type=usage(parsers.parse_path),
        metavar="FILE",
        help="file that contains only a bearer token of scope read",
    )
    parser.add_argument(
        "--client-certfile",
        type=usage(parsers.parse_path),
        metavar="FILE",
        help="PEM client certificate for tls: addresses that require one",
    )
    parser.add_argument(
        "--client-keyfile",
        type=usage(parsers.parse_path),
        metavar="FILE",
        help="PEM private key of --client-certfile, unless that file contains it",
    )
    parser.set_defaults(given=partial(asking_settings, own), command=command)
    return parser


def asking_settings(
    own: Sequence[str], parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    """Returns the daemon's addresses, the credentials, and a command's own options."""
    if args.client_keyfile is not None and args.client_certfile is None:
        parser.error("--client-keyfile needs --client-certfile")
    names = *sources.FACE_BINDS, *own, "token_file", "client_certfile", "client_keyfile"
    return {name: getattr(args, name, None) for name in names}


def asks(command: AskingCommand) -> Command:
    """Makes a command of a function that asks a daemon.

    If the daemon cannot be asked, the command writes the reason to standard error.
    """

    @wraps(command)
    def run(given: Mapping[str, object]) -> CommandResult:
        from kvd.cli import face_client

        try:
            daemon = _daemon(given)
        except (StartError, OSError) as error:
            logs.complain(error)
            return "", face_client.EXIT_UNREACHABLE
        try:
            return command(given, daemon)
        except face_client.Unreached as error:
            logs.complain(StartError(f"kvd does not answer: {error}"))
        except face_client.OTHER_FORM as error:
            logs.complain(StartError(f"kvd cannot be asked: {face_client.reason(error)}"))
        return "", face_client.EXIT_UNREACHABLE

    return run


@asks
def show_status(given: Mapping[str, object], daemon: AskedDaemon) -> CommandResult:
    from kvd.cli import face_client, status, status_report

    if not daemon.faces:
        raise face_client.Unreached(face_client.ALL_OFF)
    # No rate can be measured over no time.
    interval_s = max(float(str(given["interval"])), status.SHORTEST_S)
    may_lack = daemon.unnamed if "gateway" in daemon.faces else ()
    faces = status.check(daemon.faces, interval_s, daemon.client, may_lack)
    shown = status.figures(faces)
    # Clients choose names: some could look like lines of kvd's, or control the terminal.
    text = "\n".join(map(logs.plain, status_report.text(shown)))
    text = json.dumps(shown, indent=1) if given["json"] else text
    if face_client.are_all_absent([face.error for face in faces]):
        logs.complain(StartError(f"no face answers; {face_client.START_HINT}"))
    return f"{text}\n", status_report.exit_code(shown)


@asks
def show_findings(given: Mapping[str, object], daemon: AskedDaemon) -> CommandResult:
    from kvd.cli import doctor

    found = doctor.examine(daemon.faces, daemon.client, probes=not given["no_probe"])
    text = "\n".join(map(logs.plain, doctor.text(found)))
    text = json.dumps({"findings": found}, indent=1) if given["json"] else text
    return f"{text}\n", doctor.exit_code(found)


@asks
def explain(given: Mapping[str, object], daemon: AskedDaemon) -> CommandResult:
    from kvd.cli import explain as explaining  # here, as few commands need to load Rich
    from kvd.cli import face_client

    try:
        body = explaining.question(given)
        found = explaining.ask(daemon.faces, daemon.client, body)
    except (explaining.WrongPrompt, face_client.FaceRefused) as error:
        logs.complain(StartError(str(error)))
        return "", explaining.REFUSED
    text = f"{json.dumps(found, indent=1)}\n" if given["json"] else explaining.text(found)
    return text, explaining.EXPLAINED


@asks
def watch(given: Mapping[str, object], daemon: AskedDaemon) -> CommandResult:
    from kvd.cli import status, top  # here, as no other command needs to load Rich

    interval_s = max(float(str(given["interval"])), status.SHORTEST_S)
    return "", top.run(daemon.faces, daemon.client, interval_s)


def reload(given: Mapping[str, object]) -> CommandResult:
    from kvd.app import control

    verdict = control.reload(os.environ)
    if verdict.refused is not None:
        raise StartError(f"nothing has changed: {verdict.refused}")
    text = f"reloaded: {' '.join(verdict.changed) or 'nothing has changed'}\n"
    if verdict.waiting:
        text += f"restart needed: {' '.join(verdict.waiting)}\n"
    return text, 0


def _daemon(given: Mapping[str, object]) -> AskedDaemon:
    """Returns the daemon that the settings name; raises StartError and OSError.

    Without a file, the service's is read. If there is neither a file nor an address, the daemon may
    be `kvd gateway`, so its default address is added.
    """
    from kvd.cli import face_client

    config_file = given[sources.CONFIG] or os.environ.get(sources.CONFIG_VARIABLE)
    if not config_file and os.access(sources.SERVICE_FILE, os.R_OK):
        config_file = sources.SERVICE_FILE
    held = sources.resolve({**given, sources.CONFIG: config_file}, os.environ)
    token = secret_files.read_token("--token-file", cast("Path | None", given["token_file"]))
    client = face_client.FaceClient(
        token,
        held["tls_certfile"].value,
        cast("Path | None", given["client_certfile"]),
        cast("Path | None", given["client_keyfile"]),
    )
    binds = {name: held[face_client.setting_of(name)] for name in face_client.FACES}
    unnamed = {name for name, bind in binds.items() if bind.source == sources.BY_DEFAULT}
    faces = face_client.addresses({name: bind.value for name, bind in binds.items()})
    if not config_file and unnamed == set(binds):
        faces["gateway"] = listening.DEFAULT_GATEWAY_BIND
    return AskedDaemon(faces, unnamed, client)
