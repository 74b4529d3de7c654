"""The conductor's msgpack dialect, that of Mooncake's C++ Conductor: its bodies and answers.

It is more than another encoding of the JSON dialect: each member has one name, unknown members and
nulls are refused, and rows count blocks tier by tier, as the indexer does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgpack

from kvd.errors import BadRequest
from kvd.faces.common.bodies import MAX_KEPT_BYTES, U32_MAX
from kvd.faces.conductor.members import (
    Topic,
    checked,
    detailed,
    invalid,
    kept_text,
    named,
    wrong_type,
)
from kvd.http.messages import Form, Request, Response, content_type
from kvd.index.publishers import Described, Narrowing
from kvd.model import DEFAULT_TENANT
from kvd_core.conductor.packed import Unread, read_members

RANK_MAX = 2**31 - 1

FORM = Form(b"application/msgpack", msgpack.packb)
FORMS = dict.fromkeys(
    ("application/msgpack", "application/x-msgpack", "application/vnd.msgpack"), FORM
)

# Hash profiles by strategy: the algorithms, the projection, whether a seed is needed.
PROFILES = {
    "vllm_v1": (("sha256_cbor", "sha256"), "low64_be", True),
    "sglang": (("sha256_raw",), "first64_be", False),
    "sglang_bigram": (("sha256_raw",), "first64_be", False),
}

Members = dict[str, Any]
Value = None | int | str | bytes | tuple[str, int]  # a member's value from `read_members`
Tiers = tuple[int, int, int, int, int]  # dp rank; match on device, with own host, with host, disk


class MemberRule(NamedTuple):
    """The reader of a member, and whether the member is required."""

    read: Callable[[str, Value], Any]
    required: bool = False


def is_packed(request: Request) -> bool:
    """Returns whether a body's content type is msgpack; if so, its answer is msgpack as well."""
    return content_type(request.headers) in FORMS


def wants_packed(request: Request) -> bool:
    """Returns whether a client without a body prefers msgpack to JSON."""
    packed = other = 0.0
    for name, value in request.headers:
        if name != b"accept":
            continue
        for accepted in value.decode("latin-1").split(","):
            media, _, parameters = accepted.partition(";")
            quality = _quality(parameters)
            if media.strip().lower() in FORMS:
                packed = max(packed, quality)
            elif media.strip().lower() in ("application/json", "application/*", "*/*"):
                other = max(other, quality)
    return packed > other


def _quality(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0  # not a number: it expresses no preference
    return 1.0


def response(value: object) -> Response:
    return Response(200, FORM.write(value), FORM.content_type)


# ---- bodies


def read_question(body: bytes, array: str, width: int) -> tuple[Topic | None, bytes]:
    """Returns the topic of a question and its array as bytes; no topic for an empty instance."""
    members = _read(
        body,
        {
            "model": MemberRule(_given, True),
            "block_size": MemberRule(_block_size, True),
            array: MemberRule(_array, True),
            "tenant_id": MemberRule(kept_text),
            "lora_name": MemberRule(kept_text),
            "cache_salt": MemberRule(_text_or_nil),
            "instance_id": MemberRule(kept_text),
        },
        {array: width},
    )
    if members.get("instance_id") == "":
        return None, b""
    topic = Topic(
        members["model"],
        members.get("tenant_id") or DEFAULT_TENANT,
        members["block_size"],
        members.get("lora_name", ""),
        members.get("cache_salt") or "",
        members.get("instance_id", ""),
    )
    return topic, members[array]


def read_publisher(body: bytes) -> Described:
    """Returns the publisher that a registration describes; its addresses are not checked yet.

    A store that is registered in this dialect serves every instance.
    """
    members = _read(
        body,
        {
            "endpoint": MemberRule(_given, True),
            "type": MemberRule(_given_name, True),
            "modelname": MemberRule(_given_name, True),
            "instance_id": MemberRule(_given_name, True),
            "block_size": MemberRule(_block_size, True),
            "replay_endpoint": MemberRule(kept_text),
            "lora_name": MemberRule(_name),
            "tenant_id": MemberRule(_name),
            "cache_group": MemberRule(_cache_group),
            "hash_profile": MemberRule(_hash_profile),
            "dp_rank": MemberRule(_rank, True),
        },
    )
    echoed = ("hash_profile", "cache_group")
    described = Described(
        endpoint=members["endpoint"],
        replay_endpoint=members.get("replay_endpoint") or None,
        type=members["type"],
        model_name=members["modelname"],
        lora_name=members.get("lora_name", ""),
        tenant_id=members.get("tenant_id") or DEFAULT_TENANT,
        instance_id=members["instance_id"],
        block_size=members["block_size"],
        dp_rank=members["dp_rank"],
        salt="",
        echoed=tuple((name, members[name]) for name in echoed if members.get(name) is not None),
    )
    return checked(described.shared() if described.is_store else described)


def read_narrowing(body: bytes) -> Narrowing:
    """Returns the criteria of the publishers that are to be unregistered."""
    members = _read(
        body,
        {
            "instance_id": MemberRule(_given, True),
            "dp_rank": MemberRule(_any_rank, True),
            "tenant_id": MemberRule(kept_text),
        },
    )
    tenant = members.get("tenant_id") or DEFAULT_TENANT
    return Narrowing(tenant, members["instance_id"], members["dp_rank"])


def _read(
    body: bytes, table: Mapping[str, MemberRule], arrays: Mapping[str, int] | None = None
) -> Members:
    try:
        given = read_members(body, arrays or {})
    except ValueError as error:
        raise detailed(BadRequest(str(error)), "invalid_msgpack") from None
    for name in given:
        if name not in table:
            raise detailed(BadRequest(f"unknown field {name}"), "unknown_field", name)
    members = {}
    for name, member in table.items():
        if name in given:
            members[name] = member.read(name, given[name])
        elif member.required:
            raise detailed(BadRequest(f"{name} is required"), "missing", name)
    return members


def _text_or_nil(name: str, value: Value) -> str | None:
    return None if value is None else kept_text(name, value)


def _given(name: str, value: Value) -> str:
    given = kept_text(name, value)
    if not given:
        raise invalid(f"{name}: must not be empty", name)
    return given


def _name(name: str, value: Value) -> str:
    return named(kept_text(name, value), name)


def _given_name(name: str, value: Value) -> str:
    return named(_given(name, value), name)


def _number(name: str, value: Value, minimum: int, maximum: int) -> int:
    if type(value) is not int:
        raise wrong_type(name, "a whole number")
    if not minimum <= value <= maximum:
        text = f"{name}: expected a number from {minimum} to {maximum}"
        raise detailed(BadRequest(text), "out_of_range", name)
    return value


def _block_size(name: str, value: Value) -> int:
    return _number(name, value, 1, U32_MAX)


def _rank(name: str, value: Value) -> int:
    return _number(name, value, 0, RANK_MAX)


def _any_rank(name: str, value: Value) -> int:
    """Reads the rank of an /unregister; all its failures have the same reason."""
    try:
        return _rank(name, value)
    except BadRequest as error:
        raise invalid(str(error), name) from None


def _cache_group(name: str, value: Value) -> int | None:
    if value is None or (type(value) is int and value == 0):
        return value
    raise detailed(BadRequest(f"{name}: only 0 is served"), "unsupported", name)


def _array(name: str, value: Value) -> bytes:
    if isinstance(value, tuple):
        reason, index = value
        error = detailed(BadRequest(f"{name}: element {index} is not such a number"), reason, name)
        error.details = {**error.details, "index": index}
        raise error
    if not isinstance(value, bytes) or isinstance(value, Unread):
        raise wrong_type(name, "a bin or an array of whole numbers")
    if len(value) % (4 if name == "token_ids" else 8):
        raise invalid(f"{name}: the length of the bin is not a multiple of the element size", name)
    return value


def _hash_profile(name: str, value: Value) -> Members:
    """Returns a hash profile with its root digest; kvd only shows profiles again."""
    if not isinstance(value, Unread) or len(value) > MAX_KEPT_BYTES:
        raise wrong_type(name, f"a map of at most {MAX_KEPT_BYTES} bytes")
    profile = _read(
        bytes(value),
        {
            "strategy": MemberRule(_given, True),
            "algorithm": MemberRule(_given, True),
            "python_hash_seed": MemberRule(_given),
            "index_projection": MemberRule(_given, True),
        },
    )
    algorithms, projection, seeded = PROFILES.get(profile["strategy"], ((), "", False))
    seed = profile.get("python_hash_seed")
    if profile["algorithm"] not in algorithms or profile["index_projection"] != projection:
        raise invalid(f"{name}: unknown combination of strategy, algorithm and projection", name)
    if seeded and not _is_seed(seed):
        raise invalid(f"{name}: python_hash_seed must be `random` or 0 to {U32_MAX}", name)
    digest = _root_digest(profile["algorithm"], seed or "")
    return profile | {"python_hash_seed": seed or "", "root_digest": digest}


def _is_seed(seed: str | None) -> bool:
    if seed is None:
        return False
    is_number = seed.isascii() and seed.isdigit() and len(seed) <= 10 and int(seed) <= U32_MAX
    return is_number or seed == "random"


def _root_digest(algorithm: str, seed: str) -> str:
    """Returns the SHA-256 of the seed in vLLM's encoding; "" for algorithms without a seed."""
    if algorithm == "sha256_cbor":
        return hashlib.sha256(bytes([0x60 + len(seed)]) + seed.encode()).hexdigest()
    if algorithm == "sha256":
        import pickle  # imported here, as no other profile needs it

        return hashlib.sha256(pickle.dumps(seed, protocol=5)).hexdigest()
    return ""


# ---- answers


def rows(found: Iterable[tuple[str, list[Tiers]]]) -> Response:
    """Answers a question with the tiers of all ranks, in members of both versions of the API."""
    return response({"instances": {instance: _row(ranks) for instance, ranks in found}})


def _row(ranks: list[Tiers]) -> Members:
    each = {str(rank): _tiers(*reached) for rank, *reached in ranks}
    most = _tiers(*(max(column) for column in list(zip(*ranks, strict=True))[1:]))
    return {
        "longest_matched": most["disk"],
        "dp": {rank: tiers["gpu"] for rank, tiers in each.items()},
        "rank_matches": each,
        **most,
    }


def _tiers(device: int, own_host: int, host: int, disk: int) -> Members:
    """Returns a rank's matches by tier; each includes the match on the tiers before it."""
    return {
        "gpu": device,
        "cpu": host,
        "disk": disk,
        "npu": device,
        "cpu_local": own_host,
        "cpu_share": host,
    }
