"""Why kvd cannot start, or its settings cannot be used."""

from __future__ import annotations

import os
from typing import ClassVar


class StartError(Exception):
    """kvd cannot start; the text is the one line that the operator reads."""

    exit_code: ClassVar[int] = os.EX_CONFIG  # starting again is useless before settings change


class AddressError(StartError):
    """kvd cannot listen on a configured address, which may be free, or exist, at the next try."""

    exit_code = 1
