"""Reads the settings again for a running daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from kvd.config.load import Config, build
from kvd.config.settings import SETTINGS
from kvd.config.sources import CONFIG, CONFIG_VARIABLE, TLS_FILES, UPSTREAM_TLS_FILES, read
from kvd.gateway.tunnels import UpstreamTls
from kvd.http.auth import Token


def _digest(name: str, config: Config) -> object:
    return None if config.tls is None else config.tls.digests.get(name)


def _upstream_digest(name: str, config: Config) -> object:
    return config.upstream_tls.digests.get(name)


def _gateway_kvd_token(config: Config) -> bytes | None:
    # Several gateway processes that choose by themselves have a token of their own, and no file.
    return None if config.values["gateway_kvd"] is None else config.gateway_kvd_token


# Files of secrets, by setting, and what a configuration holds of their content: those that a reload
# reads again, and those that take a restart.
READ_AGAIN: dict[str, Callable[[Config], object]] = {
    "tokens_file": lambda config: config.policy.tokens,
    "replica_sync_client_keys": lambda config: config.curve.replicas,
    **{name: partial(_digest, name) for name in TLS_FILES},
}
READ_ONCE: dict[str, Callable[[Config], object]] = {
    "curve_secret_key_file": lambda config: config.curve.secret,
    "upstream_key_file": lambda config: config.upstream_key,
    **{name: partial(_upstream_digest, name) for name in UPSTREAM_TLS_FILES},
    "gateway_kvd_token_file": _gateway_kvd_token,
    "state_password_file": lambda config: config.state_server,
}
# Settings of a running daemon whose old files are not read again: they may be gone, once the
# settings name others.
KEPT = (
    *READ_ONCE,
    "replica_sync_client_keys",
    "peers_token_file",
    *(each.name for each in SETTINGS if each.options_class is UpstreamTls),
)
# Addresses of a running daemon, which another `outgoing_allow` may forbid by now.
ADDRESSES = "workers", "peers", "replica_sync_peers"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A configuration for a running daemon to go on with."""

    config: Config
    changed: tuple[str, ...]  # settings that have changed in `config`
    waiting: tuple[str, ...]  # settings that take a restart: `config` has their old values


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The sources of a daemon's settings apart from its configuration file."""

    given: Mapping[str, object]
    environ: Mapping[str, str]
    own_tokens: tuple[Token, ...] = ()  # of the daemon's own processes, beside those of the file

    @property
    def has_file(self) -> bool:
        """Returns whether there is a configuration file."""
        return bool(self.given.get(CONFIG) or self.environ.get(CONFIG_VARIABLE))

    def completed(self, config: Config) -> Config:
        """Returns a configuration with the tokens of the daemon's own processes, if it has any."""
        if not config.policy.tokens:  # nobody needs one
            return config
        tokens = (*config.policy.tokens, *self.own_tokens)
        return replace(config, policy=replace(config.policy, tokens=tokens))

    def again(self, running: Config) -> Reloaded:
        """Returns what the files say now, as far as a running daemon can apply it.

        Raises StartError if no daemon could start with that configuration.
        """
        values = read(self.given, self.environ)
        wanted = build(values, self.environ)
        differ = [each.name for each in SETTINGS if values[each.name] != running.values[each.name]]
        live = _live(wanted, running)
        changes = {name: values[name] for name in differ if name in live}
        once = {name: values[name] for name in KEPT} | dict.fromkeys(ADDRESSES)
        config = self.completed(build({**running.values, **changes, **once}, self.environ))
        waiting = [name for name in differ if name not in changes]
        # A file of the same name may have other content.
        waiting = list(dict.fromkeys([*waiting, *_other(READ_ONCE, config, running)]))
        kept = {name: running.values[name] for name in (*KEPT, *ADDRESSES) if name not in changes}
        read_again = config if "replica_sync_client_keys" in live else running
        config = replace(
            config,
            values={**config.values, **kept},
            workers=running.workers,
            catalog=running.catalog,
            peers=running.peers,
            replica_sync=running.replica_sync,
            peers_token=running.peers_token,
            curve=replace(running.curve, replicas=read_again.curve.replicas),
            upstream_key=running.upstream_key,
            upstream_tls=running.upstream_tls,
            gateway_kvd_token=running.gateway_kvd_token,
            state_server=running.state_server,
        )
        changed = dict.fromkeys([*changes, *_other(READ_AGAIN, config, running)])
        return Reloaded(config, tuple(changed), tuple(waiting))


def _live(wanted: Config, running: Config) -> set[str]:
    """Returns the settings that a running daemon can change to what is wanted now.

    A live setting waits, too, while one that waits for a restart needs its present value.
    """
    live = {each.name for each in SETTINGS if each.live}
    if wanted.tls is None and running.tls is not None:  # the addresses with TLS need its files
        live.difference_update(TLS_FILES)
    if running.values["router_track_output_blocks"]:
        live.discard("router_track_active_blocks")
    if None not in (running.curve.replicas, wanted.curve.replicas):
        live.add("replica_sync_client_keys")
    return live


def _other(
    files: Mapping[str, Callable[[Config], object]], config: Config, running: Config
) -> list[str]:
    return [name for name, of in files.items() if of(config) != of(running)]
