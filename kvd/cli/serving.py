"""The commands that run a daemon, with all faces or one alone, and the settings by their flags."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from typing import Any

from kvd.cli.options import WAYS, Parser, add_general, add_settings, add_uncommon, usage
from kvd.config import parsers, settings, sources
from kvd.config.binds import Binds, TcpBind
from kvd.config.sections import connecting, listening, state
from kvd.config.setting import Setting
from kvd.selection.policies import Policy, RouterPolicy

# Seconds for which a session stays with its engine after its last request, behind the gateway.
SESSION_TTL_S = 3600
# Behind the gateway a queue counts less. A turn of a conversation is short beside the cached part
# of its prompt, and a turn that leaves its engine for a shorter queue has its whole prompt computed
# again.
GATEWAY_POLICY = Policy(RouterPolicy.KVD, (("queued", 0.3),))
# Defaults of `kvd gateway` that replace those of the settings.
GATEWAY_DEFAULTS: Mapping[str, object] = dict.fromkeys(sources.FACE_BINDS, parsers.OFF) | {
    "gateway_bind": Binds((listening.DEFAULT_GATEWAY_BIND,)),
    "router_policy": GATEWAY_POLICY,
    "session_affinity_ttl_secs": SESSION_TTL_S,
    # Whether an engine serves, the gateway asks over HTTP.
    "router_disconnected_s": math.inf,
}


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
    add_address(gateway, listening.DEFAULT_GATEWAY_BIND)
    gateway.add_argument(
        "--upstream",
        action="append",
        type=usage(parsers.parse_upstreams),
        metavar="URL",
        help="engine behind the gateway, as http://HOST:PORT; repeat it for each engine",
    )
    gateway.add_argument(
        "--prefill",
        action="append",
        type=usage(parsers.parse_upstreams),
        metavar="URL",
        help="vLLM engine that computes prompts for the upstreams and hands them over; repeat it",
    )
    add_settings(gateway, settings.SETTINGS, defaults=GATEWAY_DEFAULTS)
    gateway.set_defaults(given=gateway_settings)


def add_indexer(commands: Any) -> None:
    indexer = add_face(commands, "indexer", "the KV indexer", "dynamo.indexer")
    add_address(indexer, listening.DEFAULT_INDEXER_BIND)
    add_threads(indexer)
    add_uncommon(indexer, "--routing-group", metavar="NAME", help="alias of --tenant-id")
    add_face_settings(indexer, connecting.WORKER_SETTINGS + connecting.PEER_SETTINGS, "peers")
    indexer.set_defaults(given=indexer_settings)


def add_slot_tracker(commands: Any) -> None:
    slot_tracker = add_face(commands, "slot-tracker", "the slot tracker", "dynamo.slot_tracker")
    add_address(slot_tracker, listening.DEFAULT_SLOT_TRACKER_BIND)
    shown = "replica_sync_port", "replica_sync_peers"
    add_face_settings(slot_tracker, connecting.REPLICA_SETTINGS, *shown)
    slot_tracker.set_defaults(given=slot_tracker_settings)


def add_select_service(commands: Any) -> None:
    service = add_face(commands, "select-service", "the selection service", "dynamo.select_service")
    add_address(service, listening.DEFAULT_SELECTION_BIND)
    add_threads(service)
    service.add_argument(
        "--indexer-peers",
        type=usage(parsers.parse_peers),
        metavar="URL,...",
        help="selection services to recover the index from at startup",
    )
    shown = "router_mode", "router_policy", "router_temperature", "router_use_kv_events"
    add_face_settings(
        service, connecting.WORKER_SETTINGS + settings.SELECT_SERVICE_SETTINGS, *shown
    )
    add_without_effect(service)
    service.set_defaults(given=select_service_settings)


def add_conductor(commands: Any) -> None:
    conductor = add_face(commands, "conductor", "the conductor")
    add_address(conductor, listening.DEFAULT_CONDUCTOR_BIND)
    add_face_settings(conductor, state.CONDUCTOR_SETTINGS, "hash_seed")
    conductor.set_defaults(given=conductor_settings)


def add_face(commands: Any, name: str, face: str, original: str | None = None) -> Parser:
    """Adds a command that runs one face alone, with the flags of the original Python module."""
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


def add_face_settings(parser: Parser, chosen: tuple[Setting, ...], *shown: str) -> None:
    """Adds the settings of a command that runs one face alone."""
    add_settings(parser, chosen + settings.FACE_SETTINGS, *shown)


def add_threads(parser: Parser) -> None:
    add_uncommon(
        parser,
        "--threads",
        type=usage(parsers.parse_u32),
        metavar="N",
        help="accepted without effect: kvd indexes on one thread",
    )


def add_address(parser: Parser, default: TcpBind) -> None:
    parser.add_argument(
        "--host",
        type=usage(parsers.parse_host),
        metavar="HOST",
        help=f"listening address (default {default.host})",
    )
    parser.add_argument(
        "--port",
        type=usage(parsers.parse_port),
        metavar="PORT",
        help=f"listening port (default {default.port})",
    )


class _Noted(argparse.Action):
    """Notes a flag that has no effect, whatever its value."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        name = option.removeprefix("--").removeprefix("no-")
        noted = (option, settings.WITHOUT_EFFECT[name])
        namespace.without_effect = (*namespace.without_effect, noted)


def add_without_effect(parser: argparse.ArgumentParser) -> None:
    """Adds flags of Dynamo's router that have no counterpart here: accepted without effect."""
    for name in settings.WITHOUT_EFFECT:
        names = f"--{name}", f"--no-{name}"
        parser.add_argument(*names, action=_Noted, nargs="?", help=argparse.SUPPRESS)


def serve_settings(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    return values(args, settings.SETTINGS)


def gateway_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = serve_settings(parser, args)
    for setting, flags in (("upstreams", args.upstream), ("prefills", args.prefill)):
        if flags is not None:
            named = [url for each in (given[setting] or (), *flags) for url in each]
            given[setting] = tuple(dict.fromkeys(named))
    if (bind := address(args, listening.DEFAULT_GATEWAY_BIND)) is not None:
        if args.gateway_bind is not None:
            parser.error("--gateway-bind says where to listen; --host and --port say it, too")
        given["gateway_bind"] = bind
    given[sources.DEFAULTS] = GATEWAY_DEFAULTS
    return given


def indexer_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = values(args, connecting.WORKER_SETTINGS + connecting.PEER_SETTINGS)
    if args.routing_group is not None:
        if given["tenant_id"] not in (None, args.routing_group):
            parser.error("--tenant-id and --routing-group set the same value and differ")
        given["tenant_id"] = args.routing_group
    given["indexer_bind"] = address(args, listening.DEFAULT_INDEXER_BIND)
    return only(given, args, "indexer_bind")


def slot_tracker_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = values(args, connecting.REPLICA_SETTINGS)
    given["slot_tracker_bind"] = address(args, listening.DEFAULT_SLOT_TRACKER_BIND)
    return only(given, args, "slot_tracker_bind")


def select_service_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    chosen = settings.SELECT_SERVICE_SETTINGS
    given = values(args, connecting.WORKER_SETTINGS + chosen)
    given["peers"] = args.indexer_peers
    given[sources.DEFAULTS] = {setting.name: setting.default for setting in chosen}
    given["selection_bind"] = address(args, listening.DEFAULT_SELECTION_BIND)
    return only(given, args, "selection_bind")


def conductor_settings(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> dict[str, object]:
    given = values(args, state.CONDUCTOR_SETTINGS)
    given["conductor_bind"] = address(args, listening.DEFAULT_CONDUCTOR_BIND)
    return only(given, args, "conductor_bind")


def values(args: argparse.Namespace, chosen: Iterable[Setting]) -> dict[str, Any]:
    """Returns the values of settings that the arguments give; None where they give none."""
    return {setting.name: getattr(args, setting.name) for setting in chosen}


def only(given: dict[str, object], args: argparse.Namespace, bind: str) -> dict[str, object]:
    """Adds the settings of all faces, and switches off every face but the one of `bind`."""
    given |= values(args, settings.FACE_SETTINGS)
    return given | {name: parsers.OFF for name in sources.FACE_BINDS if name != bind}


def address(args: argparse.Namespace, default: TcpBind) -> Binds | None:
    """Returns the address of a command's only face; None if no flag sets it."""
    if args.host is None and args.port is None:
        return None
    port = default.port if args.port is None else args.port
    return Binds((TcpBind(args.host or default.host, port),))
