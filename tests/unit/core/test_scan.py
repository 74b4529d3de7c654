"""The body scanner against a strict reader over Python's json, and the tables of the contract."""

from __future__ import annotations

import json
import math
import random
import sys
from array import array
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvd_core.json.scan import MAX_NESTED_BYTES, MAX_OBJECT_BYTES, BodyScanner, objects_of

U32_MAX = 2**32 - 1
I64_MIN, I64_MAX, U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
LIMITS = {"tokens": (0, U32_MAX), "hashes": (I64_MIN, U64_MAX), "signed": (I64_MIN, I64_MAX)}
FIELDS = ("name", "other", "näme")

SCANNER = BodyScanner({"tokens": "u32", "hashes": "hash64", "signed": "i64"}, FIELDS)


# -- the reference: json.loads, made strict, and the rules of a body in plain Python --------------


class Malformed(Exception):
    pass


class Wrong(Exception):
    pass


class Number(str):
    """A number as its text in the body."""


class Members(list[Any]):
    """An object as a list of its pairs, so that repeated names can be seen."""


def refuse_constant(text: str) -> None:
    raise Malformed(text)


def parse(body: bytes) -> Any:
    """Returns the value of strict JSON, with numbers as texts; raises Malformed."""
    try:
        value = json.loads(
            body.decode(),
            object_pairs_hook=Members,
            parse_int=Number,
            parse_float=Number,
            parse_constant=refuse_constant,
        )
    except ValueError as error:
        raise Malformed(error) from None
    if any("\ud800" <= c <= "\udfff" for c in strings(value)):
        raise Malformed("lone surrogate")
    return value


def strings(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "".join(map(strings, value))
    return ""


def expected(body: bytes) -> dict[str, Any]:
    """Returns the known members of a body, arrays as lists; raises Malformed or Wrong."""
    pairs = parse(body)
    if not isinstance(pairs, Members):
        raise Wrong("no object")
    known = [(name, value) for name, value in pairs if name in LIMITS or name in FIELDS]
    if len({name for name, _ in known}) != len(known):
        raise Wrong("duplicate")
    return {
        name: integers(value, *LIMITS[name]) if name in LIMITS else plain(value)
        for name, value in known
    }


def integers(value: Any, low: int, high: int) -> list[int]:
    if type(value) is not list or not all(type(item) is Number for item in value):
        raise Wrong("no array of numbers")
    if not all(item.lstrip("-").isdigit() and item != "-0" and len(item) < 30 for item in value):
        raise Wrong("no integer")
    numbers = [int(item) for item in value]
    if not all(low <= number <= high for number in numbers):
        raise Wrong("out of range")
    return [number % 2**64 for number in numbers]


def plain(value: Any) -> Any:
    if type(value) is Number:
        number = json.loads(value)
        if number in (math.inf, -math.inf):
            raise Wrong("out of range")
        return number
    if type(value) is Members:
        return {name: plain(item) for name, item in value}
    return [plain(item) for item in value] if type(value) is list else value


def scanned(scanner: BodyScanner, body: bytes) -> dict[str, Any]:
    """Returns the members found by a scan, with an array's integers instead of their number."""
    members = scanner.scan(body)
    for name in LIMITS:
        integers = scanner.array(name)
        assert members.get(name, 0) == len(integers)
        if name in members:
            members[name] = integers
    return members


def check(body: bytes) -> None:
    """Checks that the scanner agrees with the reference about a body."""
    try:
        truth = expected(body)
    except Malformed:
        # The scanner may find a wrong member before the place where the body is malformed.
        with pytest.raises((ValueError, TypeError)) as refusal:
            SCANNER.scan(body)
    except Wrong:
        with pytest.raises(TypeError) as refusal:
            SCANNER.scan(body)
    else:
        found = scanned(SCANNER, body)
        assert repr(sorted(found.items())) == repr(sorted(truth.items()))
        return
    assert SCANNER.array("tokens") == SCANNER.array("hashes") == []
    assert 0 < len(str(refusal.value)) < 120


# -- properties -----------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(0, 300),
    st.integers(0, U32_MAX),
    st.integers(I64_MIN, U64_MAX),
    st.sampled_from([U32_MAX, U32_MAX + 1, I64_MIN, I64_MIN - 1, U64_MAX, U64_MAX + 1, 10**19]),
).map(str)
odd_numbers = st.sampled_from(
    ["-0", "01", "-", "1.0", "1e0", "-01", "00", "1e400", "1E-5", "9" * 50, "--1", "+1", ".5"]
)
oddities = st.sampled_from(
    ["true", "null", '"1"', "[1]", "{}", "NaN", "-Infinity", "", "1 2", r'"\ud800"', r'"\u0031"']
)
space = st.sampled_from(["", "", " ", "\n  ", "\t", "\r\n"])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), texts),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
).filter(lambda value: "inf" not in repr(value))


@st.composite
def arrays(draw: st.DrawFn, items: st.SearchStrategy[str], max_size: int = 200) -> str:
    """Draws an array whose separators are mostly all the same, as JSON writers make them."""
    before, after = draw(space), draw(space)
    separator = draw(st.sampled_from([",", ", ", f"{before},{after}"]))
    items_drawn = draw(st.lists(items, max_size=max_size))
    return f"[{before}{separator.join(items_drawn)}{after}]"


@st.composite
def bodies(draw: st.DrawFn, items: st.SearchStrategy[str]) -> str:
    """Draws an object with known and unknown members in any order, some of them twice."""
    member = st.one_of(
        st.tuples(st.sampled_from(["tokens", "hashes", "signed"]), arrays(items)),
        st.tuples(st.sampled_from(FIELDS) | texts, values.map(json.dumps)),
    )
    members = draw(st.lists(member, max_size=6))
    comma, colon = draw(space) + "," + draw(space), draw(space) + ":" + draw(space)
    escape_names = draw(st.booleans())
    pairs = (json.dumps(name, ensure_ascii=escape_names) + colon + text for name, text in members)
    return draw(space) + "{" + draw(space) + comma.join(pairs) + "}" + draw(space)


@settings(deadline=None)
@given(st.binary())
def test_any_bytes_are_answered_as_strict_json(body: bytes) -> None:
    check(body)


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(
            rb'{ } [ ] : , "tokens" "hashes" "signed" "name" "x" " \ \u d83d \ude00'.split()
            + b"1 0 - . e 4294967296 true nul l NaN \xc3 \xa9 \xed\xa0\x80 \x00".split()
            + [b" ", b"\n"]
        )
    ).map(b"".join)
)
def test_any_tokens_are_answered_as_strict_json(body: bytes) -> None:
    check(body)
    check(b'{"tokens":[' + body)
    check(b'{"name":' + body + b"}")


@pytest.mark.slow("draws whole bodies")
@settings(deadline=None)
@given(bodies(numbers | odd_numbers | oddities))
@example('{"name":[1e999]}')
@example('{"tokens":[' + "1," * 600 + "-0]}")
@example('{"hashes":[' + "1, " * 600 + f"{10**19}, {2 * 10**19}]}}")
def test_generated_bodies_are_understood(body: str) -> None:
    check(body.encode())


@pytest.mark.slow("draws whole bodies")
@settings(deadline=None)
@given(bodies(st.integers(0, 2**20).map(str)), st.data())
def test_damaged_bodies_are_refused_or_understood(body: str, data: st.DataObject) -> None:
    raw = body.encode()
    at = data.draw(st.integers(0, len(raw)))
    removed = data.draw(st.integers(0, 3))
    check(raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + removed :])


@settings(deadline=None)
@given(
    st.lists(st.integers(0, U32_MAX)),
    st.lists(st.integers(I64_MIN, U64_MAX)),
    values,
    st.sampled_from([(",", ":"), (", ", ": "), (None, 4)]),
    st.randoms(use_true_random=False),
)
def test_what_json_writes_is_read_back(
    tokens: list[int], hashes: list[int], value: object, style: Any, shuffle: random.Random
) -> None:
    members = [("tokens", tokens), ("hashes", hashes), ("name", value), ("unknown", value)]
    shuffle.shuffle(members)
    layout = {"indent": style[1]} if style[0] is None else {"separators": style}
    body = json.dumps(dict(members), **layout).encode()
    unsigned = [hash_ % 2**64 for hash_ in hashes]
    assert scanned(SCANNER, body) == {"tokens": tokens, "hashes": unsigned, "name": value}


# -- every length at every place ------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 21))
def test_integers_of_every_length_at_every_offset(length: int) -> None:
    name = "tokens" if length < 10 else "hashes"
    rng = random.Random(length)
    low = 10 ** (length - 1) if length > 1 else 0
    high = min(10**length - 1, U64_MAX)
    truth = [rng.randint(low, high) for _ in range(40)] + [low, high]
    for separator in (",", ", ", ",\n    ", " ,", "," + " " * 70):
        numbers = separator.join(map(str, truth))
        for offset in range(64):
            body = " " * offset + f'{{"{name}":[{numbers}]}}'
            assert scanned(SCANNER, body.encode()) == {name: truth}


@pytest.mark.parametrize("count", [0, 1, 2, 511, 512, 513, 1024, 5000, 131_072])
@pytest.mark.parametrize("separator", [",", ", "])
def test_arrays_of_every_size(count: int, separator: str) -> None:
    rng = random.Random(count)
    tokens = [rng.randrange(10 ** rng.randint(1, 7)) for _ in range(count)]
    hashes = [rng.randint(I64_MIN, U64_MAX) for _ in range(count // 8)]
    body = json.dumps({"tokens": tokens, "hashes": hashes}, separators=(separator, ":")).encode()
    unsigned = [hash_ % 2**64 for hash_ in hashes]
    assert scanned(SCANNER, body) == {"tokens": tokens, "hashes": unsigned}


BAD_ANYWHERE = [
    "",
    "x",
    "-",
    "--1",
    "- 1",
    "1-",
    "1-2",
    "1 2",
    "01",
    "-01",
    "00",
    "-0",
    "1.5",
    "1e0",
]
BAD_TOKENS = ["-1", "4294967296", "9999999999", "10000000000", "1" + "0" * 20]
BAD_HASHES = [str(n) for n in (U64_MAX + 1, 2 * 10**19, 3 * 10**19 - 1, 2**65 + 1, I64_MIN - 1)]
BAD_HASHES += ["1" + "0" * 20, "9" * 25, "-" + "9" * 19, "-10000000000000000000"]
GOOD_HASHES = [str(n) for n in (0, -1, 10**16, 10**19 - 1, 10**19, U64_MAX, 2**63, I64_MIN)]


@pytest.mark.parametrize(
    ("name", "item"),
    [("tokens", item) for item in BAD_ANYWHERE + BAD_TOKENS]
    + [("hashes", item) for item in BAD_ANYWHERE + BAD_HASHES + GOOD_HASHES]
    + [("signed", item) for item in BAD_ANYWHERE + BAD_HASHES + GOOD_HASHES],
)
def test_an_odd_element_at_every_place_of_a_block(name: str, item: str) -> None:
    for separator in (",", ", "):
        for place in range(64):
            items = ["12345678", "10"] + ["7"] * (place // 2) + ["10"] * (place % 2)
            body = f'{{"{name}": [{separator.join([*items, item, *items])}]}}'
            check(body.encode())


@pytest.mark.parametrize("separator", [",", ", "])
def test_the_bad_element_is_named(separator: str) -> None:
    for place in (0, 1, 5, 100, 511, 512, 513, 700, 1999):
        items = ["7"] * 2000
        items[place] = "-1"
        body = '{"tokens":[' + separator.join(items) + "]}"
        with pytest.raises(TypeError) as refusal:
            SCANNER.scan(body.encode())
        assert str(refusal.value) == f"tokens[{place}]: -1 is not in 0..4294967295"


# -- the contract's tables ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("null", "expected an object, found null"),
        ("5", "expected an object, found a number"),
        ('"x"', "expected an object, found a string"),
        ("[]", "expected an object, found an array"),
        ("true", "expected an object, found a boolean"),
        ('["a"', "expected an object, found an array"),
        ('{"tokens": null}', "tokens: expected an array, found null"),
        ('{"tokens": 5}', "tokens: expected an array, found a number"),
        ('{"tokens": "x"}', "tokens: expected an array, found a string"),
        ('{"tokens": {}}', "tokens: expected an array, found an object"),
        ('{"tokens": ["1"]}', "tokens[0]: expected an integer, found a string"),
        ('{"tokens": [1, null]}', "tokens[1]: expected an integer, found null"),
        ('{"tokens": [true]}', "tokens[0]: expected an integer, found a boolean"),
        ('{"tokens": [[1]]}', "tokens[0]: expected an integer, found an array"),
        ('{"tokens": [1, 2, 3, 4294967296]}', "tokens[3]: 4294967296 is not in 0..4294967295"),
        ('{"tokens": [-1]}', "tokens[0]: -1 is not in 0..4294967295"),
        ('{"tokens": [1.0]}', "tokens[0]: 1.0 is not an integer"),
        ('{"tokens": [1e0]}', "tokens[0]: 1e0 is not an integer"),
        ('{"tokens": [-0]}', "tokens[0]: -0 is not an integer"),
        ('{"hashes": [-0]}', "hashes[0]: -0 is not an integer"),
        (
            '{"hashes": [18446744073709551616]}',
            "hashes[0]: 18446744073709551616 is not in -9223372036854775808..18446744073709551615",
        ),
        (
            '{"hashes": [-9223372036854775809]}',
            "hashes[0]: -9223372036854775809 is not in -9223372036854775808..18446744073709551615",
        ),
        (
            '{"signed": [9223372036854775808]}',
            "signed[0]: 9223372036854775808 is not in -9223372036854775808..9223372036854775807",
        ),
        (
            '{"tokens": [' + "9" * 5000 + "]}",
            "tokens[0]: " + "9" * 40 + "... is not in 0..4294967295",
        ),
        ('{"name": "a", "name": "b"}', "duplicate member `name`"),
        ('{"name": null, "name": null}', "duplicate member `name`"),
        (r'{"tokens": [], "token\u0073": []}', "duplicate member `tokens`"),
        ('{"tokens": [], "tokens": x', "duplicate member `tokens`"),
        ('{"name": ' + "9" * 5000 + "}", "name: a number out of range"),
        ('{"name": [{"a": ' + "9" * 5000 + "}]}", "name: a number out of range"),
        ('{"name": 1e400}', "name: a number out of range"),
        ('{"name": [-1e400]}', "name: a number out of range"),
        ('{"name": ' + "[" * 129 + "]" * 129 + "}", "name: nested deeper than 128 levels"),
        (
            '{"name": [' + "1," * (MAX_NESTED_BYTES // 2) + "1]}",
            f"name: longer than {MAX_NESTED_BYTES} bytes",
        ),
    ],
)
def test_wrong_bodies_and_their_texts(body: str, text: str) -> None:
    with pytest.raises(TypeError) as refusal:
        SCANNER.scan(body.encode())
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"", "expected a value at the end of the body"),
        (b" \n ", "expected a value at the end of the body"),
        (b"nul", "expected a value at the end of the body"),
        (b'\xef\xbb\xbf{"name":1}', "expected a value at byte 0"),
        (b'{"name":1} x', "expected no more at byte 11"),
        (b'{"name":1}{}', "expected no more at byte 10"),
        (b'{"name" 1}', "expected `:` at byte 8"),
        (b"{1:2}", "expected a member name at byte 1"),
        (b'{"name":1,}', "expected a member name at byte 10"),
        (b'{"name":1', "expected `,` or `}` at the end of the body"),
        (b'{"tokens":[1 2]}', "expected `,` or `]` at byte 13"),
        (b'{"tokens":[1,]}', "expected a value at byte 13"),
        (b'{"tokens":[01]}', "leading zero at byte 11"),
        (b'{"tokens":[1.]}', "expected a digit at byte 13"),
        (b'{"x":NaN}', "expected a value at byte 5"),
        (b'{"x":[1,}', "expected a value at byte 8"),
        (b'{"x":{"a":1]}', "expected `,` or `}` at byte 11"),
        (b'{"x":"a\tb"}', "control character in a string at byte 7"),
        (b'{"x":"a', "unterminated string at the end of the body"),
        (b'{"x":"\\x"}', "invalid escape at byte 6"),
        (b'{"x":"\\u00zz"}', "invalid escape at byte 6"),
        (b'{"x":"\\ud800"}', "lone surrogate at byte 6"),
        (b'{"x":"\\udc00\\ud800"}', "lone surrogate at byte 6"),
        (b'{"x":"\\ud800\\u0041"}', "lone surrogate at byte 6"),
        (b'{"x":"\\ud800\\ud800"}', "lone surrogate at byte 6"),
        (b'{"\\ud800":1}', "lone surrogate at byte 2"),
        (b'{"x":"\xff"}', "invalid UTF-8 at byte 6"),
        (b'{"x":"\xc0\x80"}', "invalid UTF-8 at byte 6"),
        (b'{"x":"\xf0\x80\x80\x80"}', "invalid UTF-8 at byte 6"),
        (b'{"x":"\xe6\x97"}', "invalid UTF-8 at byte 6"),
        (b'{"x":"\xed\xa0\x80"}', "invalid UTF-8 at byte 6"),
        (b'{"x":"\xf4\x90\x80\x80"}', "invalid UTF-8 at byte 6"),
        (b'{"x":' + b"[" * (2**20 + 1), "nested too deep at byte 1048581"),
    ],
)
def test_malformed_bodies_and_their_texts(body: bytes, text: str) -> None:
    with pytest.raises(ValueError) as refusal:
        SCANNER.scan(body)
    assert str(refusal.value) == text


def test_the_first_problem_is_the_one_reported() -> None:
    with pytest.raises(TypeError, match=r"tokens\[0\]"):
        SCANNER.scan(b'{"tokens":["a"],"name":')
    with pytest.raises(ValueError, match="byte 8"):
        SCANNER.scan(b'{"name":,"tokens":["a"]}')


@pytest.mark.parametrize("depth", [100_000, 2**20])
def test_unknown_members_may_nest_deeply(depth: int) -> None:
    body = b'{"x":' + b"[" * depth + b"]" * depth + b',"name":"m"}'
    assert SCANNER.scan(body) == {"name": "m"}
    objects = b'{"x":' + b'{"":' * (depth // 8) + b"[]" + b"}" * (depth // 8) + b"}"
    assert SCANNER.scan(objects) == {}


def test_unknown_members_may_repeat_and_hold_any_number() -> None:
    body = b'{"x":1,"x":' + b"9" * 5000 + b',"y":[1e99999,-0]}'
    assert SCANNER.scan(body) == {}


@pytest.mark.parametrize(
    ("written", "value"),
    [
        (b"0", 0),
        (b"-0", -0.0),  # a float, and so refused as a whole number
        (b"-1", -1),
        (b"999999999999999999", 999999999999999999),
        (b"-99999999999999999", -99999999999999999),
        (b"18446744073709551615", U64_MAX),
        (b"1.0", 1.0),
        (b"-1.5e3", -1500.0),
        (b'""', ""),
        (b'"caf\xc3\xa9"', "café"),
        (b'"\\"\\\\\\/\\b\\f\\n\\r\\t\\u0000\\u00e9\\u20ac\\ud83d\\ude00"', '"\\/\b\f\n\r\t\0é€😀'),
        (b'{"a": 1, "a": [2, {"b": null}]}', {"a": [2, {"b": None}]}),
        (b"[" * 128 + b"]" * 128, json.loads("[" * 128 + "]" * 128)),
    ],
)
def test_fields_become_python_values(written: bytes, value: object) -> None:
    found = SCANNER.scan(b'{"name":' + written + b"}")["name"]
    assert found == value
    assert type(found) is type(value)


def test_hashes_are_signed_or_unsigned() -> None:
    body = b'{"hashes":[-9223372036854775808,9223372036854775807,0,-1,18446744073709551615]}'
    assert scanned(SCANNER, body) == {"hashes": [2**63, 2**63 - 1, 0, U64_MAX, U64_MAX]}


# -- the object -----------------------------------------------------------------------------------


def test_an_array_is_forgotten_by_the_next_scan() -> None:
    SCANNER.scan(b'{"tokens":[1,2,3]}')
    assert SCANNER.scan(b'{"name":"m"}') == {"name": "m"}
    assert SCANNER.array("tokens") == []
    with pytest.raises(KeyError):
        SCANNER.array("name")


@pytest.mark.parametrize("body", ['{"tokens":[1],"name":1e400}', '{"tokens":[1],"hashes":[2,x'])
def test_a_refused_body_leaves_nothing(body: str) -> None:
    with pytest.raises((ValueError, TypeError)):
        SCANNER.scan(body.encode())
    assert SCANNER.array("tokens") == SCANNER.array("hashes") == []


def test_the_first_array_as_bytes() -> None:
    scanner = BodyScanner({"signed": "i64", "hashes": "hash64"})
    scanner.scan(b'{"hashes":[7],"signed":[-1,2,-9223372036854775808]}')
    assert scanner.hashes() == array("Q", [U64_MAX, 2, 2**63]).tobytes()
    scanner.scan(b"{}")
    assert scanner.hashes() == b""


def test_several_arrays_keep_to_themselves() -> None:
    scanner = BodyScanner({"a": "hash64", "b": "hash64", "c": "u32"})
    assert scanner.scan(b'{"c":[1],"b":[2,3],"a":[]}') == {"a": 0, "b": 2, "c": 1}
    assert [scanner.array(name) for name in "abc"] == [[], [2, 3], [1]]


def test_null_is_no_array_where_that_is_said() -> None:
    scanner = BodyScanner({"a": "u32?", "b": "i64"}, ("n",))
    assert scanner.scan(b'{"a":null,"b":[1],"n":2}') == {"b": 1, "n": 2}
    assert scanner.array("a") == []
    assert scanner.scan(b'{"a" : null }') == {}
    assert scanner.scan(b'{"a":[4]}') == {"a": 1}
    assert scanner.array("a") == [4]
    for body in (b'{"b":null}', b'{"a":[null]}', b'{"a":null,"a":null}', b'{"a":null,"a":[1]}'):
        with pytest.raises(TypeError):
            scanner.scan(body)
    for body in (b'{"a":nul}', b'{"a":nullx}', b'{"a":null'):
        with pytest.raises(ValueError):
            scanner.scan(body)


@pytest.mark.parametrize(
    ("arrays", "fields"), [({"a": "i32"}, ()), ({"a": "u32"}, ("a",)), ({}, ("a", "a"))]
)
def test_a_scanner_that_makes_no_sense_is_refused(arrays: Any, fields: Any) -> None:
    with pytest.raises(ValueError):
        BodyScanner(arrays, fields)


def test_a_huge_body_does_not_hold_its_memory() -> None:
    scanner = BodyScanner({"tokens": "u32"}, ("name",))
    small = sys.getsizeof(scanner)
    scanner.scan(b'{"tokens":[' + b"1," * (1 << 20) + b'1],"name":"\\n' + b"x" * (5 << 20) + b'"}')
    assert sys.getsizeof(scanner) > small + (9 << 20)
    scanner.scan(b"{}")
    assert sys.getsizeof(scanner) < small + 1024
    scanner.scan(b'{"tokens":[' + b"1," * 131_071 + b"1]}")
    kept = sys.getsizeof(scanner)
    scanner.scan(b"{}")
    assert sys.getsizeof(scanner) == kept >= small + (1 << 19)


def test_fields_that_are_no_scalars_are_bounded_where_they_are_to_be() -> None:
    scanner = BodyScanner({}, ("a",), ("b",), 8)
    long = b'"123456789"'
    assert scanner.scan(b'{"a":[1,2,34],"b":[%b]}' % long) == {"a": [1, 2, 34], "b": b"[%b]" % long}
    assert scanner.scan(b'{"a":%b}' % long) == {"a": "123456789"}
    for value in (b"[1,2,345]", b'{"c":  1}'):
        with pytest.raises(TypeError, match=r"^a: longer than 8 bytes$"):
            scanner.scan(b'{"a":%b}' % value)


def test_a_negative_zero_is_a_float_in_nested_values_too() -> None:
    scanner = BodyScanner({}, ("name",))
    written = '[{"a": -0, "b": [-0, 0, -1, "-0", -0.5]}]'
    found = scanner.scan(b'{"name": %b}' % written.encode())
    assert repr(found["name"]) == "[{'a': -0.0, 'b': [-0.0, 0, -1, '-0', -0.5]}]"


# -- the objects of a span -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *("[]", " [ ] ", "[{}]", '[{"a": [{}]},{"b": "],{"} , {}\n]'),
        *('[ {"\u00e4": 1e3} ,{"n": -1}]', r'[{"a\"}": "\\"}, {"\\\"{": {"b": "{"}}]'),
    ],
)
def test_objects_come_one_by_one(text: str) -> None:
    scanner = BodyScanner({}, (), ("all",))
    span = scanner.scan(b'{"all": %b}' % text.encode())["all"]
    assert isinstance(span, bytes)
    assert list(map(json.loads, objects_of(span))) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "before"),
    [
        *(("null", 0), ("1", 0), ('"[{}]"', 0), ('{"a": 1}', 0), ("[1]", 0), ("[[{}]]", 0)),
        *(("[{}, null]", 1), ("[{}, [{}]]", 1)),
        ('[{}, {"a": "' + "9" * MAX_OBJECT_BYTES + '"}]', 1),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_object_ends_the_others(text: str, before: int) -> None:
    scanner = BodyScanner({}, (), ("all",))
    span = scanner.scan(b'{"all": %b}' % text.encode())["all"]
    assert isinstance(span, bytes)
    found = objects_of(span)
    assert [next(found) for _ in range(before)] == [b"{}"] * before
    with pytest.raises(TypeError, match=r"expected an array|longer than"):
        next(found)


# -- scans in steps, and bodies that are changed ---------------------------------------------------


def outcome(scanner: BodyScanner, body: bytes, some_bytes: int) -> Any:
    """Returns what a scan in steps of so many bytes finds, 0 for a scan without steps."""
    ahead = scanner.ahead(body) if some_bytes else None
    while ahead is not None and not ahead.advance(some_bytes):
        pass
    try:
        return scanner.scan(body, ahead), [scanner.array(each) for each in LIMITS]
    except (TypeError, ValueError) as error:
        return type(error), str(error)


STEPPED = BodyScanner({"tokens": "u32", "hashes": "hash64", "signed": "i64"}, FIELDS, ("all",))


@pytest.mark.slow("draws whole bodies")
@settings(deadline=None)
@given(bodies(numbers), st.integers(1, 40), st.integers(0, 20))
@example('{"a": [[], {"b": [1, {}]}], "all": [[{"x": 1}], 2], "name": [[], [3]]}', 1, 0)
@example('{"a": ' + "[" * 70 + "]" * 70 + ', "name": ' + "[" * 129 + "]" * 129 + "}", 1, 0)
def test_steps_of_any_size_find_the_same(body: str, some_bytes: int, cut: int) -> None:
    written = body.encode()
    written = written[: len(written) - cut]
    assert outcome(STEPPED, written, some_bytes) == outcome(STEPPED, written, 0)


@pytest.mark.parametrize("part", ["[],", "{},", '"a",', "1,", '{"a":[{}]},'])
def test_a_step_ends_within_any_value(part: str) -> None:
    for name in ("unknown", "all"):
        body = b'{"%b":[%b0]}' % (name.encode(), part.encode() * 1000)
        ahead = STEPPED.ahead(body)
        steps = 1
        while not ahead.advance(100):
            steps += 1
        assert steps > len(body) // 130
    ahead = STEPPED.ahead(b"{" + b'"a":1,' * 1000 + b'"a":1}')
    assert not ahead.advance(100)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        ('{"name":1}', "{"),
        ('{ "x" : 1 , "name" : "a" }', '{ "x" : 1 ,'),
        ('{"all":[{}],"x":[1.00],"other":null,"y":"}"}\n', '{"x":[1.00],"y":"}",'),
        ('{"x":1}', '{"x":1,'),
        (" { } ", " {"),
        (r'{"n\u0061me":"\"}","x":2}', '{"x":2,'),
        ('{"name":2 ,\t"all":"" ,"x":3}', '{\t"x":3,'),
    ],
)
def test_a_body_without_its_known_members_is_open_for_others(body: str, left: str) -> None:
    scanner = BodyScanner({}, FIELDS, ("all",))
    written = body.encode()
    scanner.scan(written)
    assert scanner.opened(written) == left.encode()
