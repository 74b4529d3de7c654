"""Fields of multipart/form-data (RFC 7578), as far as the gateway needs them: never a file.

    --b CRLF
    content-disposition: form-data; name="file"; filename="a.wav" CRLF CRLF ...bytes... CRLF
    --b CRLF
    content-disposition: form-data; name="model" CRLF CRLF whisper-1 CRLF
    --b-- CRLF

Parts are found by searching for their boundary, which skips most of a body at memory speed.
"""

from __future__ import annotations

import re

from kvd.gateway.errors import GatewayError, Reason
from kvd.http.messages import Headers, content_type

MULTIPART = "multipart/form-data"
MAX_PARTS = 64  # parts of a form that are read
MAX_PART_HEAD = 4096  # bytes of a part's head
MAX_VALUE = 1024  # bytes of a field's value that are read
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'(?im)^content-disposition:\s*form-data\s*;(?:.*;)?\s*name="?([^";\r\n]*)"?')


def field_of(headers: Headers, body: bytes, name: str) -> str | None:
    """Returns a field's value, None if it is missing; raises GatewayError for other bodies."""
    if content_type(headers) != MULTIPART:
        raise GatewayError(Reason.INVALID_FORM, f"the body must be {MULTIPART}")
    header = next(value for each, value in headers if each == b"content-type")
    found = _BOUNDARY.search(header)
    if found is None:
        raise GatewayError(Reason.INVALID_FORM, "the content-type header has no boundary parameter")
    delimiter = b"--" + (found[1] or found[2])
    at = body.find(delimiter)
    for _ in range(MAX_PARTS):
        if at < 0 or body.startswith(b"--", at + len(delimiter)):
            return None
        begin = at + len(delimiter)
        at = body.find(b"\r\n" + delimiter, begin) + 2
        if at < 2:  # the closing boundary is missing: the engine will say so
            return None
        head_end = body.find(b"\r\n\r\n", begin, min(at, begin + MAX_PART_HEAD))
        if head_end < 0:
            continue
        of = _NAME.search(body, begin, head_end)
        if of is not None and of[1] == name.encode():
            return body[head_end + 4 : at - 2][:MAX_VALUE].decode("utf-8", "replace")
    return None
