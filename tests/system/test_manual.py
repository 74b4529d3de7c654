"""The generated manual pages, completions and default file agree with what kvd accepts."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from kvd.cli.main import build_parser, main
from kvd.cli.options import FullParser
from kvd.config import file as configfile
from kvd.config.settings import SETTINGS
from tests.support.processes import REPOSITORY


def load(name: str) -> ModuleType:
    """Imports a script of packaging/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "packaging" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


manual = load("manual")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all generated files."""
    path: Path = tmp_path_factory.mktemp("texts")
    manual.main(path)
    return path


def text(folder: Path, name: str) -> str:
    """Returns a page or a completion, without the escapes of roff."""
    return (folder / name).read_text().replace("\\-", "-").replace("\\fB", "").replace("\\fR", "")


def run(*command: object) -> str:
    ended = subprocess.run([str(each) for each in command], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@functools.cache
def helps() -> dict[str, set[str]]:
    """Returns the options that `--help-all` of every command lists."""
    found = {}
    for parser in manual.walk(build_parser(FullParser)):
        shown = parser.format_help()
        options = re.findall(r"^  (?:-\w, )?(--[a-z][a-z0-9-]+)", shown, re.MULTILINE)
        found[parser.prog] = set(options) - {"--help"}
    return found


def test_all_commands_are_there() -> None:
    with pytest.raises(SystemExit):
        main(["serve", "indexer"])
    words = {"serve", "indexer", "slot-tracker", "select-service", "config check", "config show"}
    assert {f"kvd {each}" for each in words} <= helps().keys()


@pytest.mark.parametrize("command", sorted(helps()))
def test_every_option_is_in_the_page_and_the_completions(folder: Path, command: str) -> None:
    page, bash, fish, zsh = (text(folder, name) for name in ("kvd.1", "kvd", "kvd.fish", "_kvd"))
    words = "_".join(["_shtab", *command.replace("-", "_").split()])
    (known,) = re.findall(rf"^{words}_option_strings=\((.*)\)$", bash, re.MULTILINE)
    if command != "kvd":
        assert f".SS {command}\n" in page
    for option in helps()[command]:
        assert option in page
        assert option in known.split()
        assert re.search(rf'["{{,)*]{option}[}},\[]', zsh)
        assert f" -l {option[2:]} " in fish


def test_the_page_describes_the_options_of_serve_once(folder: Path) -> None:
    page = text(folder, "kvd.1")
    check = page.partition(".SS kvd config check\n")[2].partition(".SS ")[0]
    assert "--config" in check and "--indexer-bind" not in check
    for heading in ("SIGNALS", "EXIT STATUS", "ENVIRONMENT", "FILES", "SEE ALSO"):
        assert f".SH {heading}\n" in page
    status = page.partition(".SS kvd status\n")[2].partition(".SS ")[0]
    assert "Exit codes: 0 all streams are exact" in status


def test_every_setting_is_in_the_page_with_its_default(folder: Path) -> None:
    page = text(folder, "kvd.toml.5")
    for setting in SETTINGS:
        _, _, about = page.partition(f"\n.TP\n{setting.name} = ")
        about = about.partition("\n.TP\n")[0]
        assert about, setting.name
        assert f"Variable: {setting.variable}" in about
        assert (" Live." in about) == setting.live, setting.name
        is_described, is_none = bool(setting.when_unset), setting.default is None
        assert ("None by default." in about) == (is_none and not is_described), setting.name
        assert (f"Default: {setting.when_unset}." in about) == (is_none and is_described), (
            setting.name
        )
        if not is_none:
            assert about.splitlines()[0] == configfile.rendered(setting.default)


def test_the_default_file_changes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert configfile.read(folder / "kvd.toml") == {}
    assert main(["config", "check", "--config", str(folder / "kvd.toml")]) == 0
    capsys.readouterr()


def test_its_lines_without_the_sign_are_the_defaults(folder: Path, tmp_path: Path) -> None:
    lines = re.findall(r"^#([a-z_]+ = .*)$", text(folder, "kvd.toml"), re.MULTILINE)
    assert [line.split()[0] for line in lines] == [each.name for each in SETTINGS]
    for line, setting in zip(lines, SETTINGS, strict=True):
        if setting.default is not None:
            path = tmp_path / "one.toml"
            path.write_text(line)
            assert configfile.read(path) == {setting.name: setting.default}


def test_the_example_of_the_page_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "kvd.toml"
    path.write_text(manual.EXAMPLE)
    assert len(configfile.read(path)) == len(tomllib.loads(manual.EXAMPLE))


@pytest.mark.parametrize(
    ("name", "shell"), [("kvd", "bash"), ("_kvd", "zsh"), ("kvd.fish", "fish")]
)
def test_shells_read_their_completions(folder: Path, name: str, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell}")
    run(shell, "-n", folder / name)


@pytest.mark.parametrize(
    ("line", "some", "never"),
    [
        ("kvd ", {"serve", "config"}, "check"),
        ("kvd --v", {"--version"}, "--help"),
        ("kvd config ", {"check", "show"}, "serve"),
        ("kvd config check --log", {"--log-level"}, "--interval"),
        ("kvd serve --log-level ", {"debug", "info", "warning", "error"}, "--help"),
        ("kvd serve --log-level debug --access-log ", {"true", "false"}, "debug"),
        ("kvd serve --router-queue-policy w", {"wspt"}, "fcfs"),
        ("kvd config check --config FOLDER/", {"FOLDER/kvd.toml"}, "--help"),
        ("kvd replay FOLDER/", {"FOLDER/kvd.toml"}, "--help"),
        ("kvd explain FOLDER/", {"FOLDER/kvd.toml"}, "--help"),
        ("kvd state show FOLDER", {"FOLDER"}, "show"),
        ("kvd indexer --", {"--port", "--threads"}, "--router-temperature"),
    ],
)
def test_bash_completes(folder: Path, line: str, some: set[str], never: str) -> None:
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    words = line.replace("FOLDER", str(folder)).split() + [""] * line.endswith(" ")
    script = (
        f"source {folder / 'kvd'}; COMP_WORDS=({' '.join(repr(word) for word in words)}); "
        f"COMP_CWORD={len(words) - 1}; _shtab_kvd; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    offered = set(run("bash", "-c", script).split())
    assert {each.replace("FOLDER", str(folder)) for each in some} <= offered
    assert never not in offered


def test_zsh_completes_values_without_an_error(folder: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh")
    script = r"""
        zmodload zsh/zpty
        zpty shell zsh -f -i
        zpty -w shell "fpath=($1 \$fpath); autoload -U compinit; compinit -u -D"
        zpty -w shell 'kvd() { print "END of $#" }'
        zpty -w -n shell $'kvd serve --indexer-bind \tx\n'
        zpty -r shell shown '*END of 3*'
        print -r -- $shown
        zpty -w -n shell $'kvd serve --log-level deb\t\n'
        zpty -r shell shown '*END of 3*'
        print -r -- $shown
    """
    shown = run("zsh", "-f", "-c", script, "zsh", folder)
    assert "not found" not in shown
    assert "debug" in shown


@pytest.mark.parametrize("name", ["kvd.1", "kvd.toml.5"])
def test_pages_are_well_formed(folder: Path, name: str) -> None:
    checker = shutil.which("groff")
    if checker is None:
        pytest.skip("no groff")
    assert run(checker, "-man", "-Tutf8", "-ww", "-z", folder / name) == ""


def test_what_is_bundled_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Packages are listed with the libraries in them, and an unknown library is an error."""
    import trio

    bundled = load("bundled")
    for name in ("trio", "httptools", "pyzmq"):
        for path in Path(trio.__file__).parent.parent.glob(f"{name}[-.]*"):
            (tmp_path / path.name).symlink_to(path)
    bundled.main(tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert f"trio {trio.__version__}: MIT OR Apache-2.0" in lines
    for each in ("llhttp: MIT", "libzmq: MPL-2.0", "libsodium: ISC"):
        (line,) = (line for line in lines if line.startswith(f"    {each}, "))
        assert (tmp_path / line.rpartition(", ")[2]).is_file()
    (tmp_path / "trio.libs").mkdir()
    (tmp_path / "trio.libs" / "libother-1.so").touch()
    with pytest.raises(SystemExit, match=r"trio has what .* does not know: libother-1\.so"):
        bundled.main(tmp_path)
