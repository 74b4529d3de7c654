"""Translates a conductor's requests from JSON to its msgpack dialect, and the answers back.

Both dialects tell how much of a prompt each instance caches, and whether a registration succeeded.
The other members of rows count different things in each dialect, so they are not compared.
"""

from __future__ import annotations

import json
import struct
from typing import Any

import httpx
import msgpack

Json = dict[str, Any]

ALIASES = {
    "modelname": "model",
    "model_name": "model",
    "additional_salt": "cache_salt",
    "additionalsalt": "cache_salt",
    "block_hash": "seq_hashes",
    "block_hashes": "seq_hashes",
}
QUESTION = {"model", "block_size", "tenant_id", "lora_name", "cache_salt", "instance_id"}
MEMBERS = {
    "/register": {"endpoint", "replay_endpoint", "type", "model", "lora_name", "tenant_id",
                  "instance_id", "block_size", "dp_rank"},
    "/unregister": {"instance_id", "tenant_id", "dp_rank"},
    "/query": QUESTION | {"token_ids"},
    "/query_by_hash": QUESTION | {"seq_hashes"},
}  # fmt: skip
REASONS = {"out_of_range": "invalid_value", "invalid_msgpack": "invalid_json"}
MARK = "x-was-packed"


class PackedDialect:
    """Translates requests to msgpack and answers to JSON; `said` counts the requests."""

    def __init__(self) -> None:
        self.packed = 0

    def request(self, http: Json) -> bytes | None:
        """Returns a request's body in msgpack, None if that dialect cannot express it."""
        known, body = MEMBERS.get(http["path"]), http.get("json")
        if known is None or not isinstance(body, dict) or "headers" in http:
            return None
        members: Json = {}
        for name, value in body.items():
            called = ALIASES.get(name, name)
            if value is None:
                continue
            if called not in known or called in members:
                return None
            members[called] = value
        if http["path"] == "/register":
            if members.get("type") == "Mooncake":
                return None  # in msgpack, a store serves every instance
            if "model" in members:
                members["modelname"] = members.pop("model")
        if http["path"] == "/unregister" and "dp_rank" not in members:
            return None
        if members.get("instance_id") == "" and http["path"].startswith("/query"):
            return None  # means no instance in msgpack, all of them in JSON
        for name, form in (("token_ids", "I"), ("seq_hashes", "Q")):
            if name in members and not _pack(members, name, form):
                return None
        try:
            packed: bytes = msgpack.packb(members)
        except (OverflowError, ValueError):
            return None
        self.packed += 1
        return packed

    def answer(self, http: Json, response: httpx.Response) -> httpx.Response:
        """Returns an answer in the form of the JSON dialect."""
        assert response.headers["content-type"] == "application/msgpack", response.content
        value = msgpack.unpackb(response.content)
        status = response.status_code
        if "instances" in value:
            value = {http["json"].get("tenant_id") or "default": value["instances"]}
        elif "error" in value:
            value["reason"] = REASONS.get(value["reason"], value["reason"])
            value["field"] = ALIASES.get(value.get("field"), value.get("field"))
            if value["reason"] == "invalid_registration":
                status = 409
        return httpx.Response(status, headers={MARK: "1"}, content=json.dumps(value).encode())

    @staticmethod
    def was_packed(response: httpx.Response) -> bool:
        return MARK in response.headers

    def expected(self, expectations: Json) -> Json:
        """Returns the expectations that hold for a translated answer."""
        return {
            name: _shared(wanted) if name.startswith("json") else wanted
            for name, wanted in expectations.items()
            if name != "header"
        }


def _pack(members: Json, name: str, form: str) -> bool:
    """Turns a list of numbers into a bin; returns False for numbers that a bin cannot express."""
    values = members[name]
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        return not isinstance(values, list) or not any(isinstance(each, str) for each in values)
    bits = 8 * struct.calcsize(form)
    if any(not -(2 ** (bits - 1)) <= each < 2**bits for each in values):
        return False
    if form == "I" and min(values, default=0) < 0:
        return False  # a bin would make it a valid token
    members[name] = struct.pack(f"<{len(values)}{form}", *(each % 2**bits for each in values))
    return True


def _shared(wanted: Any) -> Any:
    """Returns what is expected of members that both dialects have."""
    if isinstance(wanted, list):
        return [_shared(each) for each in wanted]
    if not isinstance(wanted, dict):
        return wanted
    if "longest_matched" in wanted:
        row = {"$subset": {"longest_matched": wanted["longest_matched"]}}
        # In msgpack an instance without an engine of the adapter has no row, rather than zeros.
        return {"$optional": row} if wanted["longest_matched"] == 0 else row
    return {name: _shared(each) for name, each in wanted.items()}
