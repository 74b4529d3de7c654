"""The version, read by the build and by `kvd --version`."""

from __future__ import annotations

VERSION = "0.1.0.dev0"
