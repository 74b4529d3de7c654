"""Where the value of each setting comes from: flag, environment, configuration file or default.

The command line wins over the environment, the environment over the file, the file over the
default; an empty variable counts as unset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from kvd.config import file as configfile
from kvd.config.errors import StartError
from kvd.config.parsers import OFF, nearest
from kvd.config.setting import ENV_PREFIX, Setting
from kvd.config.settings import SETTINGS, WITHOUT_EFFECT
from kvd.wire.urls import masked

FACE_BINDS = (
    "indexer_bind",
    "slot_tracker_bind",
    "selection_bind",
    "conductor_bind",
    "gateway_bind",
)

# Settings that say what a gateway has behind it.
GATEWAYS_OWN = ("upstreams", "prefills", "gateway_kvd")

# Files of TLS, by the names of their settings.
TLS_FILES = ("tls_certfile", "tls_keyfile", "tls_client_ca")
UPSTREAM_TLS_FILES = ("upstream_tls_ca", "upstream_tls_certfile", "upstream_tls_keyfile")

# What the command line calls the configuration file, and a command's own defaults; and the
# variable that names the file.
CONFIG = "config"
DEFAULTS = "defaults"
BY_DEFAULT = "default"  # the source of a value that nobody has set
CONFIG_VARIABLE = ENV_PREFIX + "CONFIG"
NEARLY = 0.9  # least likeness (difflib) of a variable to a known one that it was meant to be
SERVICE_FILE = Path("/etc/kvd/kvd.toml")  # the configuration file of systemd/kvd.service


@dataclass(frozen=True, slots=True)
class EffectiveSetting:
    """The value of a setting and its source."""

    value: Any  # typed by the table's own parse function
    source: str


def resolve(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, EffectiveSetting]:
    """Returns every setting's value and source; raises `StartError` with one line that explains.

    `given` has the parsed flags of the command line by setting name, None for those not given, and
    a command's own defaults under DEFAULTS.
    """
    path, filed = _file(given, environ)
    return {each.name: _resolve(each, given, environ, path, filed) for each in SETTINGS}


def read(given: Mapping[str, object], environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the value of every setting; takes and raises what `resolve` does.

    Raises StartError also if a flag names engines and there is no gateway, or if there are files
    for TLS, but no address with TLS. If a flag names the files, it must be an address of this
    command. If the environment or the configuration file does, which commands share, it may be an
    address there that this command does not serve.
    """
    path, filed = _file(given, environ)
    values = {each.name: _resolve(each, given, environ, path, filed).value for each in SETTINGS}
    flagged = [name for name in GATEWAYS_OWN if given.get(name)]
    if flagged and values["gateway_bind"] == OFF:
        raise StartError(f"--{flagged[0].replace('_', '-')} needs --gateway-bind")
    if any(values[name] is not None for name in TLS_FILES):
        binds = [values[name] for name in FACE_BINDS]
        if all(given.get(name) is None for name in TLS_FILES):
            faces = [each for each in SETTINGS if each.name in FACE_BINDS]
            binds += [_resolve(each, {}, environ, path, filed).value for each in faces]
        if not any(bind.tls for each in binds if each != OFF for bind in each.each):
            names = ", ".join(name for name in TLS_FILES if values[name] is not None)
            text = "TLS needs an address of a face, such as --indexer-bind tls:HOST:PORT"
            raise StartError(f"{names}: {text}")
    return values


def _file(
    given: Mapping[str, object], environ: Mapping[str, str]
) -> tuple[Path | None, dict[str, Any]]:
    """Returns the configuration file and its settings, None and no settings without a file."""
    name = given.get(CONFIG) or environ.get(CONFIG_VARIABLE)
    if not name:
        return None, {}
    path = Path(str(name))
    with reading(path):
        return path, configfile.read(path)


@contextmanager
def reading(path: Path, name: str | None = None) -> Iterator[None]:
    """Turns errors with a file into StartErrors, which name it, and the setting if unreadable."""
    try:
        yield
    except OSError as error:
        by = "" if name is None else f"{name}: "
        raise StartError(f"{by}cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise StartError(f"{path}: {error}") from None


def _resolve(
    setting: Setting,
    given: Mapping[str, object],
    environ: Mapping[str, str],
    path: Path | None,
    filed: Mapping[str, Any],
) -> EffectiveSetting:
    if (value := given.get(setting.name)) is not None:
        return EffectiveSetting(value, setting.flag)
    texts = {
        name: text
        for name in setting.variables
        if (text := environ.get(name)) is not None and (text or setting.empty_is_wrong)
    }
    if len(set(texts.values())) > 1:
        raise StartError(f"{' and '.join(texts)} set the same value and differ")
    for variable, text in texts.items():
        return _from_variable(setting, variable, text)
    if setting.name in filed:
        return EffectiveSetting(filed[setting.name], str(path))
    if setting.default_env is not None and (text := environ.get(setting.default_env)):
        return _from_variable(setting, setting.default_env, text)
    own = cast("Mapping[str, object]", given.get(DEFAULTS, {}))
    return EffectiveSetting(own.get(setting.name, setting.default), BY_DEFAULT)


def _from_variable(setting: Setting, variable: str, text: str) -> EffectiveSetting:
    try:
        return EffectiveSetting(setting.parse(text), variable)
    except ValueError as error:
        shown, why = masked(text), masked(str(error))
        raise StartError(f"{variable}={shown!r}: {why}") from None


def without_effect(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yields variables that change nothing here, though they seem meant to, each with the reason.

    Of those that begin with KVD_ these are the likely mistakes in writing: others may be meant for
    other programs, as those are that Kubernetes sets for a service named kvd.
    """
    known = {variable: variable for setting in SETTINGS for variable in setting.variables}
    # A setting with Dynamo's variable has none of kvd's own, but may be meant by that name.
    likely = {f"KVD_{each.name.upper()}": each.variables[0] for each in SETTINGS} | known
    reasons = {"DYN_" + flag.upper().replace("-", "_"): why for flag, why in WITHOUT_EFFECT.items()}
    for name in environ:
        if name in reasons:
            yield name, reasons[name]
        elif name not in known and name.startswith(("KVD_", "DYN_ROUTER_")):
            if like := nearest(name, likely, NEARLY):
                yield name, f"kvd does not know this variable; did you mean {likely[like]}?"
            elif name.startswith("DYN_"):
                yield name, "kvd does not know this variable"
