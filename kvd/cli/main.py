"""The command line: flags in, one daemon out, an exit code back.

Exit codes: 0 done, 1 not done, 2 the command line is wrong (unknown flag, bad number). A daemon
that could not start ends with 78 (EX_CONFIG) if it will not with the same configuration, with 1
otherwise; one line on stderr says why. `kvd status` has its own: 0 all streams exact, 1 some are
not, 2 something does not answer, or nothing could be asked; `kvd doctor` likewise: 0 nothing is
wrong, 1 something is, 2 nothing could be asked; `kvd explain`: 0 explained, 1 the question is
wrong, 2 nothing could be asked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from kvd._version import VERSION
from kvd.cli.settings_page import render_page
from kvd.config import load as config
from kvd.config import parsers, settings
from kvd.config.file import render
from kvd.selection.policies import Policy, RouterPolicy
from kvd.telemetry import logs
from kvd.wire.egress import EgressPolicy
from kvd.wire.urls import masked

if TYPE_CHECKING:
    from kvd.cli.face_client import FaceClient

log = logs.get_logger(__name__)

DESCRIPTION = "KV-cache index daemon: knows which inference worker holds which prompt prefix."
EXIT_NOT_DONE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # what a shell reports for SIGINT

# Seconds for which a session stays with its engine after its last request, behind the gateway.
SESSION_TTL_S = 3600
# Behind the gateway a queue counts less: turns of conversations are short beside what is cached of
# them, and each that leaves its engine for a short queue has its whole prompt computed twice.
GATEWAY_POLICY = Policy(RouterPolicy.KVD, (("queued", 0.3),))
# What `kvd gateway` has instead of the settings' own defaults.
GATEWAY_DEFAULTS: Mapping[str, object] = dict.fromkeys(config.FACE_BINDS, parsers.OFF) | {
    "gateway_bind": parsers.Binds((settings.DEFAULT_GATEWAY_BIND,)),
    "router_policy": GATEWAY_POLICY,
    "session_affinity_ttl_secs": SESSION_TTL_S,
}

CommandResult = tuple[str, int]  # what a command writes to standard output, and its exit code


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line in one line, and where it is told what would be right.

    The usage of a command does not help: it has no room for dozens of flags.
    """

    shows_all = False  # whether helps show all options, or the common ones

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        text = logs.plain(masked(message))
        self.exit(EXIT_USAGE, f"{self.prog}: {text}; see `{self.prog} --help`\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what it does not know: the command's own parser does, and names the command."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        if not hasattr(found, "parser"):  # the command's, which parses before those above it
            found.parser = self
        return found, unknown


class FullParser(Parser):
    """Shows all options in its helps, as do the parsers of its commands, which are of its class."""

    shows_all = True


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; argparse itself exits 2 on a usage error."""
    told = sys.argv[1:] if argv is None else argv
    # The options of the other commands would take most of the time that the parser does.
    known = told[0] if told and told[0] in COMMANDS else None
    args = build_parser(command=known).parse_args(told)
    try:
        given = {config.CONFIG: args.config, **args.given(args.parser, args)}
        if args.command is not None:
            return _told(*args.command(given))
        loaded = load_config(given)
        logs.setup(loaded.log_level, loaded.log_format)
        unused = (*config.without_effect(os.environ), *config.outweighed(loaded))
        for option, why in (*args.without_effect, *unused):
            log.warning("option_without_effect", option=option, reason=why)
        from kvd.app.processes import run  # here, as only a daemon needs to load all of it
        from kvd.config.reload import ConfigReader

        try:
            return run(loaded, ConfigReader(given, os.environ))
        finally:
            logs.finish()
    except config.StartError as error:
        logs.complain(error)
        return error.exit_code if args.command is None else EXIT_NOT_DONE
    except KeyboardInterrupt:  # before the daemon took the signal over
        return EXIT_INTERRUPTED


def _told(text: str, code: int) -> int:
    """Writes what a command has to say to standard output, and returns its exit code.

    Whoever reads that may leave, as `head` does: then there is nothing more to say.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
        return code
    except OSError as error:
        # What is left of the text would be tried again at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            logs.complain(config.StartError(f"cannot write: {error.strerror}"))
        return EXIT_NOT_DONE


def build_parser(kind: type[Parser] = Parser, command: str | None = None) -> Parser:
    """Returns the parser of all commands, or of the one that is named."""
    parser = kind(
        "kvd",
        description=DESCRIPTION,
        epilog="`kvd COMMAND --help` shows the options of a command. `kvd serve` needs none: it "
        "listens on the loopback interface.",
    )
    parser.add_argument("--version", action="version", version=f"kvd {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, add in COMMANDS.items():
        if command in (None, name):
            add(commands)
    return parser


# What the help of commands with settings says below the options.
WAYS = (
    "A setting is a flag, such as --indexer-bind, a variable of the environment, KVD_INDEXER_BIND, "
    "or a key of the file, indexer_bind. A flag wins over the environment, and the environment "
    "wins over the file. --help-all shows all flags; docs/configuration.md explains them."
)


def add_serve(commands: Any) -> None:  # argparse does not export the type of subparsers
    serve: Parser = commands.add_parser(
        "serve",
        help="run the indexer, slot tracker, selection service and conductor in one process",
        description="Runs the KV indexer, the slot tracker, the selection service and the "
        "conductor in one process. It needs no option.",
        epilog=WAYS,
    )
    add_general(serve)
    add_settings(serve, settings.SETTINGS)
    add_without_effect(serve)
    serve.set_defaults(given=serve_settings)


def add_gateway(commands: Any) -> None:
    gateway: Parser = commands.add_parser(
        "gateway",
        help="serve OpenAI's API and send each request to the engine that has its prompt cached",
        description="Serves OpenAI's API on one address and sends each request to the engine that "
        "has most of its prompt cached: kvd gateway --upstream http://gpu1:8000 --upstream "
        "http://gpu2:8000",
        epilog=WAYS,
    )
    add_general(gateway)
    add_address(gateway, settings.DEFAULT_GATEWAY_BIND)
    gateway.add_argument(
        "--upstream",
        action="append",
        type=_usage(parsers.parse_upstreams),
        metavar="URL",
        help="engine behind the gateway, as http://HOST:PORT; repeat it for each engine",
    )
    gateway.add_argument(
        "--prefill",
        action="append",
        type=_usage(parsers.parse_upstreams),
        metavar="URL",
        help="vLLM engine that computes prompts for the upstreams and hands them over; repeat it",
    )
    add_settings(gateway, settings.SETTINGS, defaults=GATEWAY_DEFAULTS)
    gateway.set_defaults(given=gateway_settings)


def add_indexer(commands: Any) -> None:
    indexer = add_face(commands, "indexer", "the KV indexer", "dynamo.indexer")
    add_address(indexer, settings.DEFAULT_INDEXER_BIND)
    add_threads(indexer)
    add_uncommon(indexer, "--routing-group", metavar="NAME", help="alias of --tenant-id")
    add_face_settings(indexer, settings.WORKER_SETTINGS + settings.PEER_SETTINGS, "peers")
    indexer.set_defaults(given=indexer_settings)


def add_slot_tracker(commands: Any) -> None:
    slot_tracker = add_face(commands, "slot-tracker", "the slot tracker", "dynamo.slot_tracker")
    add_address(slot_tracker, settings.DEFAULT_SLOT_TRACKER_BIND)
    shown = "replica_sync_port", "replica_sync_peers"
    add_face_settings(slot_tracker, settings.REPLICA_SETTINGS, *shown)
    slot_tracker.set_defaults(given=slot_tracker_settings)


def add_select_service(commands: Any) -> None:
    service = add_face(commands, "select-service", "the selection service", "dynamo.select_service")
    add_address(service, settings.DEFAULT_SELECTION_BIND)
    add_threads(service)
    service.add_argument(
        "--indexer-peers",
        type=_usage(parsers.parse_peers),
        metavar="URL,...",
        help="selection services to recover the index from at startup",
    )
    shown = "router_mode", "router_policy", "router_temperature", "router_use_kv_events"
    add_face_settings(service, settings.WORKER_SETTINGS + settings.SELECT_SERVICE_SETTINGS, *shown)
    add_without_effect(service)
    service.set_defaults(given=select_service_settings)


def add_conductor(commands: Any) -> None:
    conductor = add_face(commands, "conductor", "the conductor")
    add_address(conductor, settings.DEFAULT_CONDUCTOR_BIND)
    add_face_settings(conductor, settings.CONDUCTOR_SETTINGS, "hash_seed")
    conductor.set_defaults(given=conductor_settings)


def add_face(commands: Any, name: str, face: str, original: str | None = None) -> Parser:
    """Adds a command that runs one face alone, with the flags of the original's module."""
    flags = "" if original is None else f", with the flags of `python -m {original}`"
    parser: Parser = commands.add_parser(
        name,
        help=f"run {face} alone",
        description=f"Runs {face} alone{flags}.",
        epilog="The environment and the file set all other settings; `kvd serve --help-all` lists "
        "them. --help-all shows all flags of this command.",
    )
    add_general(parser)
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
        one.set_defaults(given=serve_settings, command=run)
    add_config_docs(actions)


def add_config_docs(actions: Any) -> None:
    docs = actions.add_parser(
        "docs",
        help="write the tables of docs/configuration.md",
        description="Writes the tables of docs/configuration.md, in Markdown.",
    )
    docs.set_defaults(given=no_settings, config=None, command=write_docs)


def load_config(given: Mapping[str, object]) -> config.Config:
    """Returns what the daemon would start with; raises StartError if it would refuse a file."""
    loaded = config.load(given, os.environ)
    if loaded.fleet_file is not None:
        from kvd.fleet_file import parse  # here, as only those with such a file need to load it

        with config.reading(loaded.fleet_file, "fleet_file"):
            parse.load(loaded.fleet_file, EgressPolicy(loaded.outgoing_allow))
    return loaded


def write_docs(given: Mapping[str, object]) -> CommandResult:
    return "\n".join(render_page()) + "\n", 0


def check_config(given: Mapping[str, object]) -> CommandResult:
    loaded = load_config(given)
    if loaded.tls is not None:
        from kvd.app.api_server import read_files  # here, as only those with TLS need to load it

        read_files(loaded.tls)
    for path in config.exposed_secrets(loaded):
        logs.complain(f"warning: every user can read the secret file {path}")
    return "ok\n", 0


def show_config(given: Mapping[str, object]) -> CommandResult:
    load_config(given)
    held = config.resolve(given, os.environ)
    return render({name: (said.value, said.source) for name, said in held.items()}), 0


def add_status(commands: Any) -> None:
    parser = commands.add_parser(
        "status",
        help="report the health of a running daemon",
        description="Reports the health of a running daemon: its registrations, its index, its "
        "live requests, its rates, and the workers whose event streams are inexact. It asks each "
        "face at the address in the file, the environment or the flags. Without --config it reads "
        f"the service's file, {config.SERVICE_FILE}, if that is readable.",
        epilog="Exit codes: 0 all streams are exact, 1 some streams are inexact, a worker cannot "
        "be selected or a model never matches, 2 a face does not answer.",
    )
    add_general(parser)
    add_settings(parser, settings.BIND_SETTINGS)
    parser.add_argument(
        "--interval",
        type=_usage(parsers.parse_pause),
        default=1.0,
        metavar="SECONDS",
        help="time over which rates are measured (default 1.0)",
    )
    add_credentials(parser)
    parser.add_argument("--json", action="store_true", help="write the whole report as JSON")
    parser.set_defaults(given=status_settings, command=show_status)


def add_credentials(parser: Parser) -> None:
    """Adds what commands may show to the daemon that they ask."""
    parser.add_argument(
        "--token-file",
        type=_usage(parsers.parse_path),
        metavar="FILE",
        help="file with a bearer token of scope read and nothing else",
    )
    parser.add_argument(
        "--client-certfile",
        type=_usage(parsers.parse_path),
        metavar="FILE",
        help="PEM client certificate for tls: addresses that require one",
    )
    parser.add_argument(
        "--client-keyfile",
        type=_usage(parsers.parse_path),
        metavar="FILE",
        help="PEM private key of --client-certfile, unless that file contains it",
    )


def status_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return asking_settings(parser, args, "interval", "json")


def doctor_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return asking_settings(parser, args, "json", "no_probe")


def asking_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace, *own: str
) -> dict[str, object]:
    """Returns where a daemon is asked, with which credentials, and a command's own options."""
    if args.client_keyfile is not None and args.client_certfile is None:
        parser.error("--client-keyfile needs --client-certfile")
    names = *config.FACE_BINDS, *own, "token_file", "client_certfile", "client_keyfile"
    return {name: getattr(args, name) for name in names}


def show_status(given: Mapping[str, object]) -> CommandResult:
    from kvd.cli import face_client, status

    asked = _asking(given)
    if asked is None:
        return "", status.UNREACHABLE
    values, client = asked
    # A rate over no time is that of a moment.
    interval_s = max(float(str(given["interval"])), status.SHORTEST_S)
    shown = status.figures(
        status.look(face_client.faces_of(values), interval_s, client), interval_s
    )
    # Names are their clients': some could look like lines of ours, or write anywhere on a terminal.
    text = "\n".join(map(logs.plain, status.text(shown)))
    text = json.dumps(shown, indent=1) if given["json"] else text
    return f"{text}\n", status.exit_code(shown)


def _asking(given: Mapping[str, object]) -> tuple[dict[str, Any], FaceClient] | None:
    """Returns the settings and a client for the daemon of the service; None: nothing can be asked.

    The reason is written to standard error.
    """
    from kvd.cli import face_client

    told = given[config.CONFIG] or os.environ.get(config.CONFIG_VARIABLE)
    if not told and os.access(config.SERVICE_FILE, os.R_OK):
        given = {**given, config.CONFIG: config.SERVICE_FILE}
    try:
        held = config.resolve(given, os.environ)
        token = config.read_token("--token-file", cast("Path | None", given["token_file"]))
        own = (cast("Path | None", given[f"client_{file}"]) for file in ("certfile", "keyfile"))
        client = face_client.FaceClient(token, held["tls_certfile"].value, *own)
    except (config.StartError, OSError) as error:
        logs.complain(error)
        return None
    return {name: said.value for name, said in held.items()}, client


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="find out why prompts do not match, and how to mend it",
        description="Asks a running daemon what is wrong between its engines and its choices, and "
        "writes each finding with its evidence and a remedy. The daemon also connects to "
        "engines to test them, which may take ten seconds. It is asked at the address in the "
        "file, the environment or the flags, on the first face that answers.",
        epilog="Exit codes: 0 nothing is wrong, 1 there are findings, 2 kvd cannot be asked.",
    )
    add_general(parser)
    add_settings(parser, settings.BIND_SETTINGS)
    add_credentials(parser)
    parser.add_argument(
        "--no-probe", action="store_true", help="do not connect to engines to test them"
    )
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    parser.set_defaults(given=doctor_settings, command=show_findings)


def show_findings(given: Mapping[str, object]) -> CommandResult:
    from kvd.cli import doctor, face_client

    asked = _asking(given)
    if asked is None:
        return "", doctor.UNREACHABLE
    values, client = asked
    try:
        found = doctor.examine(face_client.binds_of(values), client, probes=not given["no_probe"])
    except face_client.Unreached as error:
        logs.complain(config.StartError(f"kvd does not answer: {error}"))
        return "", doctor.UNREACHABLE
    text = "\n".join(map(logs.plain, doctor.text(found)))
    text = json.dumps({"findings": found}, indent=1) if given["json"] else text
    return f"{text}\n", doctor.exit_code(found)


def add_explain(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say why a prompt or a request goes where it goes",
        description="Asks a running daemon whom it would choose for a prompt, and says of each "
        "candidate what it caches on which tier, why it caches no more, and what its cost is made "
        "of. PROMPT is a file, - for standard input: token ids, or the body of POST /select in "
        "JSON. It is asked at the address in the file, the environment or the flags, on the first "
        "face that answers. Nothing is booked.",
        epilog="Exit codes: 0 explained, 1 the prompt or request cannot be explained, 2 kvd cannot "
        "be asked.",
    )
    add_general(parser)
    add_settings(parser, settings.BIND_SETTINGS)
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
    add_credentials(parser)
    parser.add_argument("--json", action="store_true", help="write the explanation as JSON")
    parser.set_defaults(given=explain_settings, command=explain)


def explain_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    own = "prompt", "request", "model_name", "tenant_id", "lora_name", "cache_salt", "json"
    return asking_settings(parser, args, *own)


def explain(given: Mapping[str, object]) -> CommandResult:
    from kvd.cli import explain as explaining  # here, as few commands need to load Rich
    from kvd.cli import face_client

    asked = _asking(given)
    if asked is None:
        return "", explaining.UNREACHABLE
    values, client = asked
    try:
        body = explaining.question(given)
        found = explaining.ask(face_client.binds_of(values), client, body)
    except (explaining.WrongPrompt, face_client.FaceRefused) as error:
        logs.complain(config.StartError(str(error)))
        return "", explaining.REFUSED
    except face_client.Unreached as error:
        logs.complain(config.StartError(f"kvd does not answer: {error}"))
        return "", explaining.UNREACHABLE
    text = f"{json.dumps(found, indent=1)}\n" if given["json"] else explaining.text(found)
    return text, explaining.EXPLAINED


def add_top(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch a running daemon in the terminal",
        description="Shows live what a running daemon does: rates, streams, workers "
        "with load, hit share and tiers, recent choices. The page /ui of each face shows the same. "
        "It is asked at the address in the file, the environment or the flags, on the first face "
        "that answers. q and Ctrl-C quit; arrows and space scroll.",
        epilog="Exit codes: 0 quit, 1 there is no terminal, 2 the credentials cannot be read.",
    )
    add_general(parser)
    add_settings(parser, settings.BIND_SETTINGS)
    parser.add_argument(
        "--interval",
        type=_usage(parsers.parse_pause),
        default=2.0,
        metavar="SECONDS",
        help="time between two refreshes (default 2.0)",
    )
    add_credentials(parser)
    parser.set_defaults(given=top_settings, command=watch)


def top_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return asking_settings(parser, args, "interval")


def watch(given: Mapping[str, object]) -> CommandResult:
    from kvd.cli import face_client, status, top  # here, as no other command needs to load Rich

    asked = _asking(given)
    if asked is None:
        return "", status.UNREACHABLE
    values, client = asked
    interval_s = max(float(str(given["interval"])), status.SHORTEST_S)
    return "", top.run(face_client.binds_of(values), client, interval_s)


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


def reload(given: Mapping[str, object]) -> CommandResult:
    from kvd.app import control

    verdict = control.reload(os.environ)
    if verdict.refused is not None:
        raise config.StartError(f"nothing has changed: {verdict.refused}")
    text = f"reloaded: {' '.join(verdict.changed) or 'nothing has changed'}\n"
    if verdict.waiting:
        text += f"restart needed: {' '.join(verdict.waiting)}\n"
    return text, 0


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
            type=_usage(parsers.parse_path),
            metavar="DIR",
            help="state directory, as in the setting state_dir",
        )
        one.set_defaults(given=state_options, config=None, command=partial(read_state, action))


def state_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return {"folder": args.folder}


def read_state(action: str, given: Mapping[str, object]) -> CommandResult:
    from kvd.cli import state  # here, as no other command needs to load it

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
    replay.add_options(parser, _usage)
    parser.set_defaults(given=replay_options, config=None, command=replay.run)


def replay_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return {"options": args}


def add_general(parser: Parser) -> None:
    """Adds what every command with settings has beside them."""
    # A usage with every flag fills a screen, and the common ones are not found below it.
    parser.usage = "%(prog)s [options]"
    parser.add_argument("--help-all", action=_HelpAll, help="show all options and exit")
    parser.add_argument(
        "--config",
        type=_usage(parsers.parse_path),
        metavar="FILE",
        help=f"TOML file of settings (variable {config.CONFIG_VARIABLE})",
    )
    parser.set_defaults(command=None, without_effect=())


def add_threads(parser: Parser) -> None:
    add_uncommon(
        parser,
        "--threads",
        type=_usage(parsers.parse_u32),
        metavar="N",
        help="accepted without effect: kvd indexes on one thread",
    )


def add_address(parser: Parser, default: parsers.TcpBind) -> None:
    parser.add_argument(
        "--host",
        type=_usage(parsers.parse_host),
        metavar="HOST",
        help=f"listening address (default {default.host})",
    )
    parser.add_argument(
        "--port",
        type=_usage(parsers.parse_port),
        metavar="PORT",
        help=f"listening port (default {default.port})",
    )


def add_uncommon(parser: Parser, *names: str, help: str, **options: Any) -> None:
    """Adds an option that only --help-all shows."""
    shown = help if parser.shows_all else argparse.SUPPRESS
    parser.add_argument(*names, help=shown, **options)


def add_face_settings(parser: Parser, chosen: tuple[parsers.Setting, ...], *shown: str) -> None:
    """Adds the settings of a command that runs one face alone."""
    add_settings(parser, chosen + settings.FACE_SETTINGS, *shown)


def add_settings(
    parser: Parser,
    chosen: Iterable[parsers.Setting],
    *shown: str,
    defaults: Mapping[str, object] | None = None,
) -> None:
    """Adds the flags of settings, the common ones first, then each subject under its title.

    The short help has the common ones, and those that are named as `shown`. It shows the command's
    own `defaults` instead of those of the settings.
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
    setting: parsers.Setting,
    default: object,
    *,
    is_shown: bool,
) -> None:
    """Adds the flag of a setting; that of a switch may stand alone, or as --no-..., as well."""
    remarks = [] if default is None else [f"default {default}"]
    if setting.is_borrowed:
        remarks.append(f"variable {setting.variable}")
    remark = f" ({'; '.join(remarks)})" if remarks else ""
    target.add_argument(
        *setting.flags,
        dest=setting.name,
        type=_usage(setting.parse),
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


class _HelpAll(argparse.Action):
    """Shows the help of a command with all of its options."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **kwargs)

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        _, *command = parser.prog.split()
        build_parser(FullParser).parse_args([*command, "--help"])


class _Noted(argparse.Action):
    """Notes a flag that has no effect, whatever its value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name = option.removeprefix("--").removeprefix("no-")
        noted = (option, settings.WITHOUT_EFFECT[name])
        namespace.without_effect = (*namespace.without_effect, noted)


def add_without_effect(parser: argparse.ArgumentParser) -> None:
    """Has flags of Dynamo's router taken that nothing here corresponds to."""
    for name in settings.WITHOUT_EFFECT:
        names = f"--{name}", f"--no-{name}"
        parser.add_argument(*names, action=_Noted, nargs="?", help=argparse.SUPPRESS)


def serve_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    return {setting.name: getattr(args, setting.name) for setting in settings.SETTINGS}


def gateway_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = serve_settings(parser, args)
    for setting, flags in (("upstreams", args.upstream), ("prefills", args.prefill)):
        if flags is not None:
            named = [url for each in (given[setting] or (), *flags) for url in each]
            given[setting] = tuple(dict.fromkeys(named))
    if (bind := address(args, settings.DEFAULT_GATEWAY_BIND)) is not None:
        if args.gateway_bind is not None:
            parser.error("--gateway-bind says where to listen; --host and --port say it, too")
        given["gateway_bind"] = bind
    given[config.DEFAULTS] = GATEWAY_DEFAULTS
    return given


def no_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, object]:
    return {}


def indexer_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    shared = settings.WORKER_SETTINGS + settings.PEER_SETTINGS
    given = {setting.name: getattr(args, setting.name) for setting in shared}
    if args.routing_group is not None:
        if given["tenant_id"] not in (None, args.routing_group):
            parser.error("--tenant-id and --routing-group set the same value and differ")
        given["tenant_id"] = args.routing_group
    given["indexer_bind"] = address(args, settings.DEFAULT_INDEXER_BIND)
    return only(given, args, "indexer_bind")


def slot_tracker_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = {setting.name: getattr(args, setting.name) for setting in settings.REPLICA_SETTINGS}
    given["slot_tracker_bind"] = address(args, settings.DEFAULT_SLOT_TRACKER_BIND)
    return only(given, args, "slot_tracker_bind")


def select_service_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    chosen = settings.SELECT_SERVICE_SETTINGS
    shared = settings.WORKER_SETTINGS + chosen
    given = {setting.name: getattr(args, setting.name) for setting in shared}
    given["peers"] = args.indexer_peers
    given[config.DEFAULTS] = {setting.name: setting.default for setting in chosen}
    given["selection_bind"] = address(args, settings.DEFAULT_SELECTION_BIND)
    return only(given, args, "selection_bind")


def conductor_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = {setting.name: getattr(args, setting.name) for setting in settings.CONDUCTOR_SETTINGS}
    given["conductor_bind"] = address(args, settings.DEFAULT_CONDUCTOR_BIND)
    return only(given, args, "conductor_bind")


def only(given: dict[str, object], args: argparse.Namespace, bind: str) -> dict[str, object]:
    """Adds what all faces have, and switches off every face but the one of `bind`."""
    given |= {each.name: getattr(args, each.name) for each in settings.FACE_SETTINGS}
    return given | {name: parsers.OFF for name in config.FACE_BINDS if name != bind}


def address(args: argparse.Namespace, default: parsers.TcpBind) -> parsers.Binds | None:
    """Returns where a command's only face is to listen; None if the flags do not say."""
    if args.host is None and args.port is None:
        return None
    port = default.port if args.port is None else args.port
    return parsers.Binds((parsers.TcpBind(args.host or default.host, port),))


def _usage(parse: Callable[[str], object]) -> Callable[[str], object]:
    """Wraps a parser of texts so that argparse shows its reason, not only that it failed."""

    def convert(text: str) -> object:
        try:
            return parse(text)
        except ValueError as error:
            shown = masked(text), masked(str(error))
            raise argparse.ArgumentTypeError("{!r}: {}".format(*shown)) from None

    return convert


COMMANDS: dict[str, Callable[[Any], None]] = {  # in the order of the help
    "gateway": add_gateway,
    "serve": add_serve,
    "indexer": add_indexer,
    "slot-tracker": add_slot_tracker,
    "select-service": add_select_service,
    "conductor": add_conductor,
    "config": add_config,
    "status": add_status,
    "doctor": add_doctor,
    "explain": add_explain,
    "top": add_top,
    "reload": add_reload,
    "state": add_state,
    "replay": add_replay,
}
