"""Fields of multipart/form-data, whatever surrounds them."""

from __future__ import annotations

import pytest

from kvd.gateway.errors import GatewayError, Reason
from kvd.gateway.multipart import MAX_PART_HEAD, MAX_PARTS, field_of

TYPE = b"multipart/form-data; boundary=b"


def part(head: bytes, value: bytes) -> bytes:
    return b"--b\r\ncontent-disposition: form-data; %b\r\n\r\n%b\r\n" % (head, value)


FILE = part(b'name="file"; filename="model"', b'--c\r\nname="model"\r\n\r\nno')
MODEL = part(b'name="model"', b"whisper")
END = b"--b--\r\n"


def model(body: bytes, content_type: bytes = TYPE) -> str | None:
    return field_of([(b"content-type", content_type)], body, "model")


@pytest.mark.parametrize(
    "body",
    [
        MODEL + END,
        FILE + MODEL + END,
        MODEL + FILE + END,
        b"preamble\r\n" + FILE + MODEL + END + b"epilogue",
        part(b"name=model", b"whisper") + END,
        part(b'filename="x;y"; name="model"', b"whisper") + END,
        b'--b\r\nContent-Type: text/plain\r\nContent-Disposition: Form-Data; NAME="model"\r\n\r\n'
        b"whisper\r\n" + END,
        MODEL + part(b'name="model"', b"another") + END,  # the first one counts
    ],
)
def test_the_field_is_found(body: bytes) -> None:
    assert model(body) == "whisper"
    assert model(body, b'Multipart/Form-Data; charset=x; boundary="b"') == "whisper"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b",
        END,
        FILE + END,
        END + MODEL,
        MODEL.removesuffix(b"\r\n"),
        b"--b\r\n\r\nwhisper\r\n" + END,
        b"--b\r\ncontent-disposition: form-data; " + b"x" * MAX_PART_HEAD + MODEL[5:] + END,
        FILE * MAX_PARTS + MODEL + END,
    ],
)
def test_without_the_field(body: bytes) -> None:
    assert model(body) is None


@pytest.mark.parametrize("content_type", [b"application/json", b"multipart/form-data", b""])
def test_other_bodies_are_refused(content_type: bytes) -> None:
    with pytest.raises(GatewayError) as refused:
        model(MODEL + END, content_type)
    assert refused.value.reason is Reason.INVALID_FORM


def test_long_values_are_cut() -> None:
    assert model(part(b'name="model"', b"\xff" * 5000) + END) == "\ufffd" * 1024
