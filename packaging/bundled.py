#!/usr/bin/env python3
"""Lists the Python packages in a folder and the code of others inside them, with all licences.

usage: packaging/bundled.py FOLDER; fails for code of others that INSIDE does not name
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution
from pathlib import Path

# Code of others in wheels: its name, its licence, and the licence's text in the wheel's dist-info.
INSIDE = {
    "httptools": (
        ("llhttp", "MIT", "vendor/llhttp/LICENSE"),
        ("http-parser", "MIT", "vendor/http-parser/LICENSE-MIT"),
    ),
    "pyzmq": (
        ("libzmq", "MPL-2.0", "licenses/LICENSE.zeromq.txt"),
        ("libsodium", "ISC", "licenses/LICENSE.libsodium.txt"),
        ("parts of Tornado", "Apache-2.0", "licenses/LICENSE.tornado.txt"),
    ),
}


LICENCE_FIELDS = "License-Expression", "License"


def licence(distribution: Distribution) -> str:
    every = map(distribution.metadata.get_all, LICENCE_FIELDS)
    declared: str | None = next((found[0] for found in every if found), None)
    if declared and "\n" not in declared:
        return declared
    classifiers = distribution.metadata.get_all("Classifier") or []
    found = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    return ", ".join(found) or "see its files"


def unknown(name: str, info: Path) -> list[str]:
    """Returns the libraries and licence texts of others in a package that INSIDE does not name."""
    inside = INSIDE.get(name, ())
    libraries = [path.name for path in info.parent.glob(f"{name}.libs/*")]
    known = tuple(f"{each}-" for each, _, _ in inside)
    left = [library for library in libraries if not library.startswith(known)]
    licences = info / "licenses"
    texts = (str(path.relative_to(licences)) for path in licences.glob("*/**/*") if path.is_file())
    return left + [text for text in texts if text not in [each for _, _, each in inside]]


def described(info: Path) -> list[str]:
    distribution = Distribution.at(info)
    name = distribution.metadata["Name"]
    if left := unknown(name, info):
        sys.exit(f"{name} has what packaging/bundled.py does not know: {', '.join(left)}")
    lines = [f"{name} {distribution.version}: {licence(distribution)}"]
    for each, terms, text in INSIDE.get(name, ()):
        lines.append(f"    {each}: {terms}, {info.name}/licenses/{text}")
    if name == "kvd":
        lines.append("    xxHash: BSD-2-Clause, the file copyright")
    return lines


def main(folder: Path) -> None:
    found = sorted(folder.glob("*.dist-info"), key=lambda info: info.name.lower())
    for info in found:
        print("\n".join(described(info)))
    print(f"\nLicence texts: /usr/lib/kvd/*.dist-info. {len(found)} packages.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
