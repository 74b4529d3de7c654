"""Replaces the placeholders of a scenario with the values of one run."""

from __future__ import annotations

import re
import secrets
from typing import Any

from tests.conformance.engine import Engine
from tests.conformance.servers import FakeHttp, Spawned
from tests.support.ports import find_free_port

PLACEHOLDER = re.compile(r"\{([A-Za-z_][\w.:-]*)\}")
WHOLE_ID = re.compile(r"\{id:\d+\}")
IDS_PER_RUN = 1000
MOST_RUNS = 2**53 // IDS_PER_RUN  # ids stay below 2^53, which every JSON reader keeps whole


class Names:
    """The engines, servers, ids and ports of one run.

    `rename` gives members of requests and expectations other names: {"tenant_id": "group"}.
    """

    def __init__(self, base_url: str, rename: dict[str, str]) -> None:
        self._base_url = base_url
        self._rename = rename
        self.engines: dict[str, Engine] = {}
        self.servers: dict[str, Spawned | FakeHttp] = {}
        self._run = secrets.token_hex(6)
        self._first_id = secrets.randbelow(MOST_RUNS) * IDS_PER_RUN
        self._ports: dict[str, int] = {}

    def fill(self, value: Any) -> Any:
        """Returns a value of a step with every placeholder replaced."""
        if isinstance(value, str):
            text = PLACEHOLDER.sub(self._replace, value)
            return int(text) if WHOLE_ID.fullmatch(value) else text
        if isinstance(value, list):
            return [self.fill(item) for item in value]
        if isinstance(value, dict):
            return {
                PLACEHOLDER.sub(self._replace, self._rename.get(name) or name): self.fill(item)
                for name, item in value.items()
            }
        return value

    def _replace(self, placeholder: re.Match[str]) -> str:
        text = placeholder[1]
        if text == "run":
            return self._run
        if text == "base":
            return self._base_url
        kind, _, argument = text.partition(":")
        if kind == "id":
            return str(self._first_id + int(argument))
        if kind == "port":
            if argument not in self._ports:
                self._ports[argument] = find_free_port()
            return str(self._ports[argument])
        name, _, part = text.partition(".")
        if name in self.engines:
            return self.engines[name].endpoint(part)
        if name in self.servers:
            return self.servers[name].base_url
        return placeholder[0]
