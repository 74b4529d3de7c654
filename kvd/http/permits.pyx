# distutils: language = c++
"""The rules of authorization, for fast paths and tasks alike; see http/permits.hpp."""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE

from enum import IntEnum

MAX_TOKEN_BYTES = 128  # longest token that a request may carry

# `judge` returns an index of this tuple.
VERDICTS = ("granted", "missing", "malformed", "unknown", "scope", "host", "origin")


class ClientTrust(IntEnum):
    """The degree to which a client is known."""

    NEW = 0  # it has asked nothing yet
    UNKNOWN = 1  # it has asked only for routes that are open to everybody
    KNOWN = 2  # it has been granted more


cdef Text as_text(bytes data):
    cdef Text text
    text.begin = PyBytes_AS_STRING(data)
    text.size = PyBytes_GET_SIZE(data)
    return text


cdef class PermitRules:
    """Tokens and host names; empty at first."""

    def replace(self, list tokens not None, list hosts not None, list origins not None):
        """Replaces the tokens (token, bits of its scopes) and the names, in lower case."""
        cdef bytes text
        if any(not 0 < len(text) <= MAX_TOKEN_BYTES for text, _ in tokens):
            raise ValueError(f"a token is 1 to {MAX_TOKEN_BYTES} bytes long")
        self.core.clear()
        for text, scopes in tokens:
            self.core.add_token(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text), scopes)
        for text in hosts:
            self.core.add_host(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))
        for text in origins:
            self.core.add_origin(PyBytes_AS_STRING(text), PyBytes_GET_SIZE(text))

    def judge(self, list headers not None, unsigned scope, bint checks_host):
        """Returns the index in VERDICTS of the verdict on a request with these headers."""
        cdef Claims claims
        cdef bytes name, value
        for name, value in headers:
            claims.take(as_text(name), as_text(value))
        return <int>self.core.judge(claims, scope, checks_host)
