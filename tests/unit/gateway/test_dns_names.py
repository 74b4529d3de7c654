"""DNS names of engines whose addresses change."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from kvd.errors import Unavailable
from kvd.gateway.dns_names import MAX_ADDRESSES, MEET_S, FollowedName, Wanted
from kvd.net.dialing import Dialer, Unreachable


class Answers(Dialer):
    """A dialer that looks nothing up: it gives prepared answers in order, the last one for ever."""

    def __init__(self, *answers: list[str] | Unreachable) -> None:
        super().__init__()
        self.asked = 0
        self._answers = answers

    async def addresses(self, host: str) -> list[str]:
        await trio.lowlevel.checkpoint()
        answer = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        if isinstance(answer, Unreachable):
            raise answer
        return answer


class Engines:
    """Replaces the part that follows single engines; records the calls to it."""

    def __init__(self, refuses: str = "", silent: str = "") -> None:
        """Refuses the engine `refuses`; the engine `silent` does not answer probes."""
        self.changes: list[str] = []
        self.wanted: list[Wanted] = []
        self.met = trio.Event()
        self.met.set()
        self._refuses, self._silent = refuses, silent

    def want(self, wanted: Wanted, owner: str) -> Engines:
        if wanted.url == self._refuses:
            raise Unavailable("there is no room")
        self.changes.append(f"+{wanted.url}")
        self.wanted.append(wanted)
        return Engines() if wanted.url != self._silent else Silent()

    def unwant(self, wanted: Wanted, owner: str) -> None:
        self.changes.append(f"-{wanted.url}")


class Silent(Engines):
    """Engines that do not answer probes."""

    def __init__(self) -> None:
        super().__init__()
        self.met = trio.Event()


async def seen(
    dialer: Answers, engines: Engines, lookups: int, url: str = "dns:vllm:8000"
) -> FollowedName:
    """Follows a name for so many lookups, and returns it."""
    name = FollowedName(Wanted(url))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(name.run, engines, dialer)
        while dialer.asked < lookups:  # noqa: ASYNC110 - under a clock that jumps
            await trio.sleep(1)
        await trio.sleep(dialer.lookup_every_s / 2)
        name.following.cancel()
    return name


async def test_engines_are_those_of_the_last_answer(autojump_clock: MockClock) -> None:
    engines = Engines()
    dialer = Answers(["10.0.0.1", "10.0.0.2"], ["10.0.0.2", "10.0.0.3"], ["10.0.0.2"])
    name = await seen(dialer, engines, 3)
    assert engines.changes == [
        "+http://10.0.0.1:8000",
        "+http://10.0.0.2:8000",
        "+http://10.0.0.3:8000",
        "-http://10.0.0.1:8000",
        "-http://10.0.0.3:8000",
    ]
    assert name.urls == {"http://10.0.0.2:8000"}


async def test_a_lookup_that_fails_changes_nothing(autojump_clock: MockClock) -> None:
    engines = Engines()
    name = await seen(Answers(["10.0.0.1"], Unreachable("no such name")), engines, 3)
    assert engines.changes == ["+http://10.0.0.1:8000"]
    assert name.problem == "no such name"


async def test_who_has_gone_serves_until_who_came_is_met(autojump_clock: MockClock) -> None:
    engines = Engines(silent="http://10.0.0.2:8000")
    start = trio.current_time()
    await seen(Answers(["10.0.0.1"], ["10.0.0.2"]), engines, 3)
    assert engines.changes[1:] == ["+http://10.0.0.2:8000", "-http://10.0.0.1:8000"]
    assert trio.current_time() - start > MEET_S


async def test_certificates_are_of_the_name(autojump_clock: MockClock) -> None:
    engines = Engines()
    await seen(Answers(["10.0.0.1"]), engines, 1, "dns:https://vllm:8443")
    assert engines.wanted == [Wanted("https://10.0.0.1:8443", server_name="vllm")]


async def test_ipv4_is_preferred_and_an_address_counts_once(autojump_clock: MockClock) -> None:
    engines = Engines()
    await seen(Answers(["10.0.0.1", "10.0.0.1", "fd00::1"]), engines, 1)
    assert engines.changes == ["+http://10.0.0.1:8000"]
    alone = Engines()
    await seen(Answers(["fd00::1"]), alone, 1)
    assert alone.changes == ["+http://[fd00::1]:8000"]


async def test_there_is_a_bound(autojump_clock: MockClock) -> None:
    engines = Engines()
    found = [f"10.0.{number // 256}.{number % 256}" for number in range(MAX_ADDRESSES + 5)]
    await seen(Answers(found), engines, 1)
    assert len(engines.changes) == MAX_ADDRESSES


async def test_one_that_is_refused_is_tried_again(autojump_clock: MockClock) -> None:
    engines = Engines(refuses="http://10.0.0.1:8000")
    name = await seen(Answers(["10.0.0.1", "10.0.0.2"]), engines, 2)
    assert name.urls == {"http://10.0.0.2:8000"}
    assert name.problem == "there is no room"


@pytest.mark.parametrize(
    "url",
    [
        "dns:",
        "dns:vllm",
        "dns:vllm:0",
        "dns:vllm:99999",
        "dns:10.0.0.1:80",
        "dns:a b:80",
        "dns:a:80/",
        "dns:http://a:80",
        "dns:https://a",
        "dns:https://10.0.0.1:443",
        "dns:https://a:443/v1",
    ],
)
def test_what_is_no_name(url: str) -> None:
    with pytest.raises(ValueError):
        Wanted(url).name  # noqa: B018 - reading it is what raises
