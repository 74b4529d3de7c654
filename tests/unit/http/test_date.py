"""The `date` header of answers."""

from __future__ import annotations

from email.utils import formatdate

from hypothesis import given
from hypothesis import strategies as st

from kvd.http.front import date_line


@given(st.integers(0, 2**33))
def test_the_form_is_that_of_mail(seconds: int) -> None:
    assert date_line(seconds) == b"date: %b\r\n" % formatdate(seconds, usegmt=True).encode()
