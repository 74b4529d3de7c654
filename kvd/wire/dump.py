"""Media types and headers of the dumps that indexers exchange.

`kvd_core/dump/binary.hpp` describes the binary form. Its media type names the version, so that a
daemon can offer a later version beside it.
"""

from __future__ import annotations

import re

_ZERO = re.compile(rb"q\s*=\s*0(\.0*)?")  # RFC 9110 12.4.2: not acceptable

BINARY_DUMP = b"application/vnd.kvd.dump.v1"
JSON_DUMP = b"application/json"

# Names the process that wrote the dump: a daemon that finds its own name there has asked itself.
INSTANCE_HEADER = b"kvd-instance"
# Present while the process is taking a peer's dump itself, so that its own may be incomplete.
RECOVERING_HEADER = b"kvd-recovering"


def wants_binary(accept: bytes) -> bool:
    """Returns whether an Accept header names the binary form, other than to refuse it (q=0)."""
    for part in accept.lower().split(b","):
        media, *parameters = (text.strip() for text in part.split(b";"))
        if media == BINARY_DUMP:
            return not any(_ZERO.fullmatch(parameter) for parameter in parameters)
    return False
