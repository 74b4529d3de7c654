"""Postpones loading modules of the standard library that trio imports, until they are used.

trio has TLS and DTLS, which a daemon without TLS never uses. Its `import ssl` and `import hmac`
load OpenSSL, which takes 5 MB and 6 ms.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

POSTPONED = ("hashlib", "hmac", "ssl")


def postpone() -> None:
    """Makes the first use of these modules load them, rather than their import."""
    for name in POSTPONED:
        sys.modules.setdefault(name, _Postponed(name))


class _Postponed(ModuleType):
    """Takes a module's place where it is imported; has all of its names once it is loaded."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # no use: `inspect` asks every module for such names
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)
