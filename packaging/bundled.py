#!/usr/bin/env python3
"""Lists the Python packages in a folder: name, version, licence, and where their licence texts are.

usage: packaging/bundled.py FOLDER
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions


def licence(distribution: Distribution) -> str:
    said = distribution.metadata.get("License-Expression") or distribution.metadata.get("License")
    if said and "\n" not in said:
        return said
    classifiers = distribution.metadata.get_all("Classifier") or []
    found = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License ::")]
    return ", ".join(found) or "see its files"


def main(folder: str) -> None:
    found = sorted(distributions(path=[folder]), key=lambda each: each.metadata["Name"].lower())
    for each in found:
        print(f"{each.metadata['Name']} {each.version}: {licence(each)}")
    print(f"\nLicence texts: /usr/lib/kvd/*.dist-info. {len(found)} packages.")


if __name__ == "__main__":
    main(sys.argv[1])
