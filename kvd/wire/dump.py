"""Media types and headers of the dumps that indexers exchange.

The binary form is described in `kvd_core/dump/binary.hpp`; the media type names its version, so a
later one has another and both can be offered.
"""

from __future__ import annotations

import re

_ZERO = re.compile(rb"q\s*=\s*0(\.0*)?")  # RFC 9110 12.4.2: not acceptable

BINARY_DUMP = b"application/vnd.kvd.dump.v1"
JSON_DUMP = b"application/json"

# Names the process that wrote the dump: a client that finds its own name asked itself.
INSTANCE_HEADER = b"kvd-instance"
# There while the process itself is taking a peer's dump, so that what it has may be a part.
RECOVERING_HEADER = b"kvd-recovering"


def wants_binary(accept: bytes) -> bool:
    """Returns whether an Accept header names the binary form, other than to refuse it (q=0)."""
    for part in accept.lower().split(b","):
        media, *parameters = (text.strip() for text in part.split(b";"))
        if media == BINARY_DUMP:
            return not any(_ZERO.fullmatch(parameter) for parameter in parameters)
    return False
