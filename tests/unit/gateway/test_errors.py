"""The client of a stream gets an error if its answer breaks off."""

from __future__ import annotations

import json

import pytest

from kvd.gateway.errors import ErrorForm, GatewayError, Reason, ended, event, is_whole

BROKEN = GatewayError(Reason.UPSTREAM_FAILED, "the engine broke off its answer")


@pytest.mark.parametrize(
    ("tail", "end"),
    [
        (b"", b""),
        (b"data: 1\n\n", b""),
        (b"data: 1\r\n\r\n", b""),
        (b"data: 1\r\r", b""),
        (b"data: 1\n\ndata: {}\n", b"\n"),
        (b"data: 1\r\n\r\nevent: x\r\n", b"\n"),
        (b"data: 1\r\n\r\ndata: {}\r", b"\n\n"),
        (b"data: 1\r\n\r\ndata: {}\r\n\r", b"\n\n"),
        (b"data: 1\n\n: keep-al", b"\n\n"),
        (b"data: 1\n\nevent: respo", b"\n\n"),
        (b'data: 1\n\ndata: {"x', None),
        (b"data: 1\n\nda", None),
        (b": keep-al", b"\n\n"),
    ],
)
def test_an_event_ends_only_if_it_is_not_taken_for_whole(tail: bytes, end: bytes | None) -> None:
    assert ended(tail, whole=True) == end


@pytest.mark.parametrize(
    ("tail", "end"),
    [
        (b"x" * 1024, None),
        (b": in the middle of a text", None),  # part of a data line longer than the kept bytes
        (b"x\n\n: keep-al", b"\n\n"),
    ],
)
def test_a_line_whose_beginning_is_not_kept_is_taken_for_data(
    tail: bytes, end: bytes | None
) -> None:
    assert ended(tail, whole=False) == end


OPENAI, RESPONSES, ANTHROPIC = ErrorForm.OPENAI, ErrorForm.RESPONSES, ErrorForm.ANTHROPIC


@pytest.mark.parametrize(
    ("form", "tail", "whole"),
    [
        (OPENAI, b'data: {"a":1}\n\ndata: [DONE]\n\n', True),
        (OPENAI, b"data:[DONE]\r\n\r\n", True),
        (OPENAI, b"data: [DONE]\n", True),
        (OPENAI, b"data: [DONE]", False),
        (OPENAI, b'data: {"a":1}\n\n', False),
        (OPENAI, b'data: "data: [DONE]"\n\n', False),
        (OPENAI, b'data: [DONE]\n\ndata: {"a":1}\n\n', False),
        (OPENAI, b"", False),
        (RESPONSES, b'data: {"type":"response.completed","response":{}}\n\n', True),
        (RESPONSES, b'...},"sequence_number":9,"type":"response.failed"}\n\n', True),
        (RESPONSES, b'event: error\ndata: {"type": "error"}\n\n', True),
        (RESPONSES, b'data: {"type":"response.created"}\n\n', False),
        (RESPONSES, b'data: {"delta":"\\"type\\":\\"response.completed\\""}\n\n', False),
        (RESPONSES, b'data: {"type":"response.completed","respon', False),
        (ANTHROPIC, b'event: message_stop\ndata: {"type": "message_stop"}\n\n', True),
        (ANTHROPIC, b'data: {"type": "message_delta"}\n\n', False),
    ],
)
def test_a_stream_is_whole_with_its_last_event(form: ErrorForm, tail: bytes, whole: bool) -> None:
    assert is_whole(form, tail) is whole


def test_events_are_in_the_form_of_the_api() -> None:
    shown = event(BROKEN, ErrorForm.OPENAI, b"r", b"")
    assert json.loads(shown.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"
    tail = b'data: {"type":"response.output_text.delta","sequence_number": 41}\n\n'
    name, data, *_ = event(BROKEN, ErrorForm.RESPONSES, b"r", tail).split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "message": "the engine broke off its answer",
        "code": "upstream_failed",
        "param": None,
        "sequence_number": 42,
    }
    name, data, *_ = event(BROKEN, ErrorForm.ANTHROPIC, b"r", tail).split(b"\n")
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "error": {"type": "api_error", "message": "the engine broke off its answer"},
        "request_id": "r",
    }
