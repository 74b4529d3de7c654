"""Reads the settings again, for a daemon that is running."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvd.config import CONFIG, CONFIG_VARIABLE, TLS_FILES, Config, build, read
from kvd.settings import SETTINGS

TOKENS = "tokens_file"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A configuration to go on with."""

    config: Config
    changed: tuple[str, ...]  # settings that are not as before
    waiting: tuple[str, ...]  # those that take a restart: `config` has them as they were


@dataclass(frozen=True, slots=True)
class Reader:
    """What a daemon was started with, apart from its configuration file."""

    given: Mapping[str, object]
    environ: Mapping[str, str]
    demo: bool = False

    @property
    def has_file(self) -> bool:
        """Whether there is a file of settings."""
        return bool(self.given.get(CONFIG) or self.environ.get(CONFIG_VARIABLE))

    def again(self, running: Config) -> Reloaded:
        """Returns what the file says now, as far as a running daemon can follow.

        Raises StartError for a configuration that no daemon could start with.
        """
        said = read(self.given, self.environ)
        wanted = build(said, self.environ, demo=self.demo)
        differ = [each for each in SETTINGS if said[each.name] != running.values[each.name]]
        # Addresses wait for a restart, and those with TLS need its files until then.
        held = TLS_FILES if wanted.tls is None and running.tls is not None else ()
        taken = [each.name for each in differ if each.live and each.name not in held]
        changes = {name: said[name] for name in taken}
        config = build({**running.values, **changes}, self.environ, demo=self.demo)
        changed = list(changes)
        if config.policy.tokens != running.policy.tokens and TOKENS not in changes:
            changed.append(TOKENS)  # the same file says something else
        before, now = ({} if each.tls is None else each.tls.digests for each in (running, config))
        other = {name for name in TLS_FILES if before.get(name) != now.get(name)}
        changed += sorted(other - changes.keys())
        return Reloaded(
            config,
            tuple(changed),
            tuple(each.name for each in differ if each.name not in changes),
        )
