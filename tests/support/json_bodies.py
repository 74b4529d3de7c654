"""Random JSON bodies of requests, valid and invalid, for tests of hot handlers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hypothesis import strategies as st

OTHERS = ("null", "true", "false", "[]", "{}", '"7"')  # of a wrong type for most members


def written(members: Mapping[str, str]) -> bytes:
    """Returns the object whose members have these JSON texts as values."""
    return ("{" + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}").encode()


@st.composite
def bodies(draw: st.DrawFn, usual: Mapping[str, str], values: Mapping[str, Sequence[str]]) -> bytes:
    """A usual body with some members changed, added or left out, now and then damaged."""
    members = dict(usual)
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(list(values)))
        value = draw(st.sampled_from([*values[name], *OTHERS, ""]))
        members[name] = value
        if not value:
            del members[name]
    body = written(members)
    if draw(st.integers(0, 15)) == 0:
        at = draw(st.integers(0, len(body)))
        body = body[:at] + draw(st.binary(max_size=2)) + body[at + 1 :]
    return body
