"""Modules of the standard library that trio imports, loaded once something of them is wanted.

trio has TLS and DTLS, which a daemon without TLS never uses. Its `import ssl` and `import hmac`
bring OpenSSL along, which takes 5 MB and 6 ms.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

POSTPONED = ("hashlib", "hmac", "ssl")


def postpone() -> None:
    """Has the first use of these modules load them, instead of their import."""
    for name in POSTPONED:
        sys.modules.setdefault(name, _Postponed(name))


class _Postponed(ModuleType):
    """Stands for a module in what has imported it, and has all that the module has once loaded."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # only looks at every module, as `inspect` does
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = importlib.import_module(self.__name__)
        vars(self).update(vars(module))
        return getattr(module, name)
