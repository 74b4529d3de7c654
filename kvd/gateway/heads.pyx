# distutils: language = c++
"""Rewrites heads of requests for engines, and heads of answers for clients (RFC 9110 §7.6.1).

Fields that belong to one connection are dropped, and so are those that `connection` names. Fields
by which a client would choose an engine or a rank are dropped as well: only the gateway sets them.
So is the wish for a compressed answer. All others pass unchanged.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libcpp.string cimport string
from libcpp.unordered_set cimport unordered_set

from collections import namedtuple

cdef extern from "<string.h>" nogil:
    void* memchr(const void* text, int c, size_t n)
    int memcmp(const void* a, const void* b, size_t n)

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"expect",
    )
)
# The gateway writes these itself.
OURS = frozenset((b"host", b"content-length", b"x-request-id"))
# Header fields by which some servers let a client choose an engine or a rank.
FLEET_HEADERS = frozenset(
    (
        b"x-data-parallel-rank",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        b"x-gateway-destination-endpoint",
        b"cookie",
    )
)
# The gateway cannot read compressed answers: a stream's events, errors, ids, cached tokens.
CODINGS = frozenset((b"accept-encoding",))
NOT_SENT = HOP_BY_HOP | OURS | FLEET_HEADERS | CODINGS
NOT_RETURNED = HOP_BY_HOP | frozenset(
    (b"server", b"date", b"content-length", b"x-request-id", b"request-id")
)
KEY_HEADERS = frozenset((b"authorization", b"x-api-key"))  # show a client's key
cdef frozenset NONE = frozenset()
MAX_REQUEST_ID = 128  # bytes of the longest x-request-id of a client that is kept
# The head of an engine's answer: the lines of the headers that go on to the client, and the length
# of the body, None where the engine does not give it.
EngineHead = namedtuple("EngineHead", ("status", "lines", "length"))

cdef unordered_set[string] DROPPED = NOT_RETURNED


def request_id_of(list headers not None, str made not None):
    """Returns the client's x-request-id if it can be passed on, else the one that was made."""
    cdef bytes name, value
    for name, value in headers:
        if name == b"x-request-id" and is_request_id(value):
            return value
    return made.encode()


cdef bint is_request_id(bytes value):
    cdef Py_ssize_t i, size = PyBytes_GET_SIZE(value)
    cdef const unsigned char* text = <const unsigned char*>PyBytes_AS_STRING(value)
    for i in range(size):
        if not 0x21 <= text[i] <= 0x7e:
            return False
    return 0 < size <= <Py_ssize_t>MAX_REQUEST_ID


def request_head(str method not None, bytes target not None, list headers not None,
                 bytes authority not None, size_t length, bytes request_id not None, more=(),
                 frozenset without not None=NONE):
    """Returns the head of a client's request as an engine gets it.

    `target` is path and query. `more` are headers of the gateway's own, which replace the client's;
    headers named in `without` are left out.
    """
    cdef string head
    cdef bytes name, value
    cdef set ours = {name for name, _ in more}
    cdef frozenset named = named_by_connection(headers)
    head.reserve(512)
    add(head, b"%b %b HTTP/1.1\r\n" % (method.encode(), target))
    for name, value in headers:
        if name in NOT_SENT or name in named or name in ours or name in without:
            continue
        if not begins_with(name, b"x-kvd-") and not begins_with(name, b"x-smg-"):
            add_header(head, name, value)
    for name, value in more:
        add_header(head, name, value)
    add_header(head, b"x-request-id", request_id)
    add_header(head, b"host", authority)
    add(head, b"content-length: %d\r\n\r\n" % length)
    return PyBytes_FromStringAndSize(head.data(), head.size())


cdef void add(string& text, bytes more):
    text.append(PyBytes_AS_STRING(more), PyBytes_GET_SIZE(more))


cdef void add_header(string& head, bytes name, bytes value):
    add(head, name)
    add(head, b": ")
    add(head, value)
    add(head, b"\r\n")


cdef bint begins_with(bytes text, bytes beginning):
    cdef size_t size = PyBytes_GET_SIZE(beginning)
    if <size_t>PyBytes_GET_SIZE(text) < size:
        return False
    return memcmp(PyBytes_AS_STRING(text), PyBytes_AS_STRING(beginning), size) == 0


def credentials(request, bytes key not None):
    """Returns the headers that show an engine a key, and the client's headers to leave out.

    A key that the gateway has checked is meant for the gateway alone, and is not forwarded.
    """
    if request.is_checked:
        return [(b"authorization", b"Bearer " + key)] if key else [], KEY_HEADERS
    cdef bytes name, value, api_key = None
    for name, value in request.headers:
        if name == b"authorization":
            return [], NONE
        if name == b"x-api-key":
            api_key = value
    # The only header from which engines read a key.
    return [(b"authorization", b"Bearer " + api_key)] if api_key is not None else [], NONE


def own_head(str method not None, str path not None, bytes authority not None, size_t length,
             bytes key=b""):
    """Returns the head of a request of the gateway's own, with a bearer `key` if there is one."""
    shown = b"authorization: Bearer %b\r\n" % key if key else b""
    body = b"content-type: application/json\r\ncontent-length: %d\r\n" % length if length else b""
    return b"%b %b HTTP/1.1\r\nhost: %b\r\naccept: */*\r\n%b%b\r\n" % (
        method.encode(),
        path.encode(),
        authority,
        body,
        shown,
    )


def read_head(bytes head not None):
    """Reads the head of an engine's answer, which the relay has found well-formed."""
    cdef const char* at = PyBytes_AS_STRING(head)
    cdef const char* end = at + PyBytes_GET_SIZE(head) - 2  # behind the last line's CRLF
    cdef HeaderField field
    cdef unordered_set[string] named
    cdef string lines
    status = (at[9] - c"0") * 100 + (at[10] - c"0") * 10 + at[11] - c"0"
    length = None
    cdef const char* first = <const char*>memchr(at, c"\n", end - at) + 1
    at = first
    while at < end:
        at = read_field(at, end, field)
        if field.name == b"connection":
            for each in (<bytes>field.value).split(b","):
                named.insert(<string>each.strip().lower())
    lines.reserve(end - first)
    at = first
    while at < end:
        at = read_field(at, end, field)
        if length is None and field.name == b"content-length":
            length = int(<bytes>field.value)
        if DROPPED.count(field.name) or named.count(field.name):
            continue
        if field.name.compare(0, 6, b"x-kvd-") and field.name.compare(0, 15, b"access-control-"):
            lines.append(field.name).append(b": ").append(field.value).append(b"\r\n")
    return EngineHead(status, <bytes>lines, length)


cdef struct HeaderField:
    string name   # in lower case
    string value  # without blanks around it


cdef const char* read_field(const char* at, const char* end, HeaderField& field):
    """Reads the line of a field; returns where the next one begins."""
    cdef const char* stop = <const char*>memchr(at, c"\r", end - at)
    cdef const char* colon = <const char*>memchr(at, c":", stop - at)
    cdef const char* last = stop
    cdef size_t i
    field.name.assign(at, colon - at)
    for i in range(field.name.size()):
        if c"A" <= field.name[i] <= c"Z":
            field.name[i] |= 0x20
    at = colon + 1
    while at < last and (at[0] == c" " or at[0] == c"\t"):
        at += 1
    while last > at and ((last - 1)[0] == c" " or (last - 1)[0] == c"\t"):
        last -= 1
    field.value.assign(at, last - at)
    return stop + 2


def rendered(list headers not None):
    """Returns the lines of headers."""
    cdef string lines
    cdef bytes name, value
    for name, value in headers:
        add_header(lines, name, value)
    return PyBytes_FromStringAndSize(lines.data(), lines.size())


cdef frozenset named_by_connection(list headers):
    cdef bytes name, value
    cdef list names = None
    for name, value in headers:
        if name == b"connection":
            names = names or []
            names += [each.strip().lower() for each in value.split(b",")]
    return NONE if names is None else frozenset(names)
