"""Bodies for POST routes: faults for which any route refuses a body, and checks of refusals.

`indexer_bodies.py` and its like for other faces have a valid body for each route of their face.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.http_client import Client

JSON = {"content-type": "application/json"}


def deep(opening: bytes, closing: bytes, levels: int = 100_000) -> bytes:
    return opening * levels + b"1" + closing * levels


# Values of an unknown member that are JSON, and some that are not.
JSON_VALUES = {
    "arrays 100,000 deep": deep(b"[", b"]"),
    "objects 100,000 deep": deep(b'{"a":', b"}"),
    "5,000 digits": b"9" * 5000,
    "a huge exponent": b"1e999999",
    "the same name again": b'1, "x": 2',
    "surrogate pair": rb'"\ud83d\ude00"',
    "NUL, escaped": rb'"\u0000"',
}
NO_JSON_VALUES = {
    "nothing": b"",
    "NaN": b"NaN",
    "infinity": b"-Infinity",
    "leading zero": b"01",
    "plus sign": b"+1",
    "no digit after the point": b"1.",
    "no digit before the point": b".1",
    "no exponent": b"1e",
    "hexadecimal": b"0x1",
    "single quotes": b"'a'",
    "capital letters": b"TRUE",
    "a comment": b"1 /* one */",
    "a comma too many": b"1,",
    "control character": b'"\x1f"',
    "NUL": b'"\0"',
    "unknown escape": rb'"\x"',
    "lone surrogate": rb'"\ud800"',
    "surrogates the wrong way round": rb'"\ude00\ud83d"',
    "no UTF-8": b'"\xff"',
    "overlong UTF-8": b'"\xc0\x80"',
    "surrogate in UTF-8": b'"\xed\xa0\x80"',
    "arrays that do not end": b"[" * 100_000,
    "objects that do not end": b'{"a":' * 100_000,
}
WHOLE_BODIES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda valid: b"",
    "blank": lambda valid: b" \r\n\t",
    "truncated": lambda valid: valid[:-1],
    "twice": lambda valid: valid * 2,
    "with a byte order mark": lambda valid: b"\xef\xbb\xbf" + valid,
    "UTF-16": lambda valid: valid.decode().encode("utf-16"),
    "a form": lambda valid: b"model_name=m&block_size=4",
    "vertical tab": lambda valid: b"\v" + valid,
}
NO_OBJECTS = (b"null", b"true", b"5", b'"x"', b"[]", deep(b"[", b"]"))

U32 = ("18446744073709551616", "4294967296", "-1")
NO_INTEGERS = (
    "1.0",
    "-0",
    "1e0",
    "1e400",
    "true",
    '"1"',
    "[1]",
    "{}",
    "9" * 5000,
    "-" + "9" * 5000,
)
NO_TEXTS = ("1", "true", "[]", '{"a": "b"}')
# kvd shows the names that it keeps in many outputs, so they may have no control characters.
NO_NAMES = (*NO_TEXTS, '"a\\u0000b"', '"a\\n"', '"\\u007f"', '"\\u009b2J"')
NO_ARRAYS = ("null", "1", '"1"', "{}")


def elements(*numbers: str) -> list[str]:
    """Returns arrays with one bad element: no integer, or one of `numbers`, out of range."""
    return [f"[1, {value}]" for value in (*NO_INTEGERS, "null", *numbers)]


@dataclass(frozen=True)
class Bodies:
    """The bodies of one face's POST routes."""

    posts: dict[str, tuple[dict[str, Any], int]]  # a valid body, and its status in the tests
    required: dict[str, tuple[str, ...]]
    # By route and member: JSON that does not fit. Null is listed where it does not mean absence.
    unfit: dict[str, dict[str, tuple[str, ...]]]
    contradictions: dict[str, tuple[bytes, ...]]  # members that exclude each other
    limits: dict[str, int]  # bytes


CONTENT_TYPES = {
    "application/json": True,
    "application/json; charset=utf-8": True,
    "Application/JSON": True,
    "application/vnd.kvd+json": True,
    "": False,
    "json": False,
    "text/json": False,
    "text/plain": False,
    "application/jsonx": False,
    "application/json, text/plain": False,
    "application/x-www-form-urlencoded": False,
}

# Dynamo accepts these: it stops reading after the object, and does not decode texts it ignores.
READ_BY_THE_PEER = {
    "twice",
    "x: lone surrogate",
    "x: surrogates the wrong way round",
    "x: no UTF-8",
    "x: overlong UTF-8",
    "x: surrogate in UTF-8",
}


class Refusals:
    """Posts bodies to a running face; a refused body must change nothing."""

    def __init__(
        self,
        client: Client,
        bodies: Bodies,
        state: Callable[[], object],
        undo: Callable[[str], None],
    ) -> None:
        """`state` returns all that a request may change; `undo` reverts a valid post to a route."""
        self._client = client
        self._bodies = bodies
        self._state = state
        self._undo = undo

    def valid(self, path: str) -> bytes:
        return json.dumps(self._bodies.posts[path][0]).encode()

    def with_member(self, path: str, member: str, value: str, **others: str) -> bytes:
        """Returns a valid body in which one member has another value, given as JSON.

        `others` replace members that the valid body has.
        """
        valid = self._bodies.posts[path][0]
        members = {name: others.get(name, valid[name]) for name in valid} | {member: 0}
        return json.dumps(members).replace(f'"{member}": 0', f'"{member}": {value}').encode()

    def refused(self, path: str, bodies: dict[str, bytes], status: int, **more: str) -> list[str]:
        """Posts bodies, all of which must be refused with `status`; returns the errors."""
        before = self._state()
        errors = []
        for name, body in bodies.items():
            response = self._client.post(path, content=body, headers=JSON | more)
            assert (name, response.status_code) == (name, status), response.text
            assert response.headers["content-type"] == "application/json"
            members = response.json()
            assert members.keys() == {"error"} and isinstance(members["error"], str)
            errors.append(members["error"])
        assert self._state() == before, list(bodies)
        return errors

    def accepted(self, path: str, bodies: dict[str, bytes], **more: str) -> None:
        """Posts bodies, all of which must have the valid body's status."""
        for name, body in bodies.items():
            response = self._client.post(path, content=body, headers=JSON | more)
            status = self._bodies.posts[path][1]
            assert (name, response.status_code) == (name, status), response.text
            self._undo(path)

    def check_no_json(self, path: str) -> None:
        valid = self.valid(path)
        bodies = {name: change(valid) for name, change in WHOLE_BODIES.items()}
        bodies |= {name: valid[:-1] + b', "x": ' + v + b"}" for name, v in NO_JSON_VALUES.items()}
        bodies["lone surrogate in a text"] = self.with_member(path, "model_name", r'"\ud800"')
        errors = self.refused(path, bodies, 400)
        assert all(error.startswith("the body is not valid JSON: ") for error in errors), errors

    def check_wrong_shape(self, path: str) -> None:
        valid = self.valid(path)
        first, value = next(iter(self._bodies.posts[path][0].items()))
        name, again = first.encode(), json.dumps(value).encode()
        escaped = b"\\u%04x%b" % (name[0], name[1:])
        bodies = {f"no object: {body[:9]!r}": body for body in NO_OBJECTS}
        bodies["a name twice"] = valid[:-1] + b', "%b": %b}' % (name, again)
        bodies["a name twice, once escaped"] = valid[:-1] + b', "%b": %b}' % (escaped, again)
        for both in self._bodies.contradictions.get(path, ()):
            bodies[repr(both)] = valid[:-1] + b", " + both + b"}"
        self.refused(path, bodies, 422)

    def check_unfit(self, path: str) -> None:
        for member, values in self._bodies.unfit[path].items():
            bodies = {
                f"{member}: {value[:30]}": self.with_member(path, member, value) for value in values
            }
            # A model that is unknown too does not hide what is wrong with the body.
            bodies |= {
                f"{name}, unknown model": self.with_member(
                    path, member, value, model_name="unknown"
                )
                for name, value in zip(list(bodies), values, strict=True)
            }
            for error in self.refused(path, bodies, 422):
                assert error.startswith(member), error
                assert len(error) < 200  # it does not repeat 5,000 digits

    def check_missing(self, path: str) -> None:
        for missing in self._bodies.required[path]:
            valid = self._bodies.posts[path][0]
            rest = {name: value for name, value in valid.items() if name != missing}
            (error,) = self.refused(path, {missing: json.dumps(rest).encode()}, 422)
            assert error == f"missing member `{missing}`"

    def check_ignored(self, path: str) -> None:
        valid = self.valid(path)
        more = {name: valid[:-1] + b', "x": ' + value + b"}" for name, value in JSON_VALUES.items()}
        self.accepted(path, more)

    def check_content_types(self, path: str) -> None:
        valid = self.valid(path)
        for content_type, accepted in CONTENT_TYPES.items():
            announced = {"content-type": content_type}
            if accepted:
                self.accepted(path, {content_type: valid}, **announced)
            else:
                self.refused(path, {content_type: valid}, 415, **announced)
        assert self._client.post(path, content=valid).status_code == 415

    def check_limit(self, path: str) -> None:
        valid = self.valid(path)
        longest = valid + b" " * (self._bodies.limits[path] - len(valid))
        self.accepted(path, {"as long as may be": longest})
        self.refused(path, {"a byte more": longest + b" "}, 413)

    def all_kinds(self, path: str) -> dict[str, bytes]:
        """Returns a body for each fault in these tables, by name."""
        valid = self.valid(path)
        bodies = {name: change(valid) for name, change in WHOLE_BODIES.items()}
        bodies |= {
            f"x: {name}": valid[:-1] + b', "x": ' + v + b"}" for name, v in NO_JSON_VALUES.items()
        }
        bodies |= {f"no object: {body[:9]!r}": body for body in NO_OBJECTS}
        for member, values in self._bodies.unfit[path].items():
            bodies |= {
                f"{member}: {value[:30]}": self.with_member(path, member, value) for value in values
            }
        for missing in self._bodies.required[path]:
            valid_members = self._bodies.posts[path][0]
            rest = {name: value for name, value in valid_members.items() if name != missing}
            bodies[f"without {missing}"] = json.dumps(rest).encode()
        return bodies

    def check_peer(self, path: str, theirs: Client, *more: str) -> None:
        """Compares the statuses with a live Dynamo's.

        Dynamo also accepts the bodies whose names begin with one of `more`.
        """
        answers = {
            name: tuple(
                one.post(path, content=body, headers=JSON).status_code
                for one in (self._client, theirs)
            )
            for name, body in self.all_kinds(path).items()
        }
        differing = {name: both for name, both in answers.items() if both[0] != both[1]}
        beyond_a_double = {name for name in answers if "1e400" in name or "99999" in name}
        assert {name for name, both in differing.items() if both == (422, 400)} == beyond_a_double
        taken = {name for name in answers if name.startswith(more)}
        # Dynamo accepts control characters in names.
        odd = tuple(value[:30] for value in NO_NAMES if value not in NO_TEXTS)
        taken |= {name for name in answers if name.endswith(odd)}
        assert differing.keys() - beyond_a_double == READ_BY_THE_PEER | taken


# What every POST route must refuse or accept; each face has a test that runs all of these checks.
NO_JSON, UNFIT = "no JSON is 400", "a member that does not fit is 422 and named"
CHECKS: dict[str, Callable[[Refusals, str], None]] = {
    NO_JSON: Refusals.check_no_json,
    "JSON of a wrong shape is 422": Refusals.check_wrong_shape,
    UNFIT: Refusals.check_unfit,
    "a member that is missing is 422 and named": Refusals.check_missing,
    "what is no business of the route is ignored": Refusals.check_ignored,
    "bodies must be announced as JSON": Refusals.check_content_types,
    "a body over the limit is 413": Refusals.check_limit,
}


def check_methods(client: Client, allowed: Mapping[str, str]) -> None:
    """Asserts that these paths refuse other methods than theirs, and do not end in a slash."""
    for path, methods in allowed.items():
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            if method not in methods:
                response = client.request(method, path)
                assert (path, method, response.status_code) == (path, method, 405)
                assert response.headers["allow"] == methods
                assert response.json().keys() == {"error"}
        assert client.post(path + "/", json={}).status_code == 404
