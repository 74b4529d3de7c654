"""Replays of recorded requests: engines by example, and properties that always hold."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from io import StringIO
from math import inf, nan
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvd.cli.main import main
from kvd.replay import policies, progress
from kvd.replay.cache import Event, Stored
from kvd.replay.engine import Engine, Speed
from kvd.replay.figures import measure
from kvd.replay.mooncake import BLOCK_SIZE, mixed
from kvd.replay.policies import Chooser
from kvd.replay.progress import ProgressBar, line
from kvd.replay.recording import RecordedRequest, ReplayError, Windows, reusable_share
from kvd.replay.routers import CoreRouter, Delayed, Routing, SeveralRouters
from kvd.replay.simulation import ReplayOutcome, SimulatedFleet, replay
from kvd.replay.table import span
from kvd.replay.traffic import Traffic
from kvd_core.selector.settings import Settings
from tests.support.traces import conversations

MODES = ("round-robin", "random", "least-loaded", "dynamo", "kvd")
CHUNK_S = 0.2048  # time of a step that prefills
STEP_S = 0.0151  # time of a decode step of one request, without its blocks
BLOCK_S = 0.00001
FLEET = SimulatedFleet(engines=3, capacity=60)


class HonestRouter(CoreRouter):
    """A router that checks at each choice that its index equals what the engines hold."""

    def route(self, request: RecordedRequest, held: Callable[[], list[int]], now: float) -> int:
        chosen = super().route(request, held, now)
        seen = [row.device_blocks for row in self.pool.explain(self.settings)]
        assert seen == held()
        return chosen


def requests(*sizes: tuple[float, int, int, tuple[int, ...]]) -> list[RecordedRequest]:
    """Returns requests with these arrivals, prompt tokens, output tokens and full blocks."""
    return [
        RecordedRequest(f"r{number}", *size, array("Q", size[3]).tobytes())
        for number, size in enumerate(sizes)
    ]


def read(path: Path, seed: int = 1, **options: object) -> list[RecordedRequest]:
    return Traffic(path, **{"spread_s": 0.0} | options).requests(seed)  # type: ignore[arg-type]


def run(
    asked: Sequence[RecordedRequest],
    mode: str = "dynamo",
    fleet: SimulatedFleet = FLEET,
    seed: int = 1,
) -> ReplayOutcome:
    router = HonestRouter(fleet, Chooser(mode).settings(), seed)
    outcome = replay(asked, fleet, router)
    assert router.ledger.stats()["requests"] == 0
    router.ledger.verify()
    router.index.verify()
    held = router.index.stats()["held"]["device"]
    assert held == sum(len(engine.cache.pins) for engine in outcome.engines)
    return outcome


@pytest.mark.parametrize("mode", MODES)
def test_all_requests_are_served(mode: str, tmp_path: Path) -> None:
    asked = read(conversations(tmp_path))
    outcome = run(asked, mode)
    assert [job.request for job in outcome.jobs] == asked
    for job in outcome.jobs:
        assert job.request.arrival_s <= job.prefill_starts_s < job.first_token_s < job.done_s
        assert 0 <= job.hit_tokens < job.request.input_tokens
        assert job.hit_tokens % BLOCK_SIZE == 0
    computed = sum(job.request.input_tokens - job.hit_tokens for job in outcome.jobs)
    assert computed == sum(engine.prefilled_tokens for engine in outcome.engines)
    assert measure(outcome).cached <= reusable_share(asked, BLOCK_SIZE)
    end = max(job.done_s for job in outcome.jobs)
    for engine in outcome.engines:
        check_idle(engine)
        assert engine.busy_s <= end


def check_idle(engine: Engine) -> None:
    assert engine.live == 0 and engine.cache.anonymous == 0
    assert set(engine.cache.pins.values()) <= {0}
    assert set(engine.cache.idle) == set(engine.cache.pins)
    assert len(engine.cache.pins) <= engine.cache.capacity


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    asked = read(conversations(tmp_path))
    figures = {seed: measure(run(asked, "random", seed=seed)) for seed in (1, 2)}
    assert measure(run(asked, "random", seed=1)) == figures[1] != figures[2]


def test_the_cache_decides_where_prefixes_are_shared(tmp_path: Path) -> None:
    asked = read(conversations(tmp_path))
    shares = {mode: measure(run(asked, mode)).cached for mode in MODES}
    assert shares["kvd"] > 1.15 * max(shares[mode] for mode in MODES[:3])


def test_choices_of_others_are_judged() -> None:
    router = CoreRouter(SimulatedFleet(engines=2), Settings(), 1)
    first, second = requests((0.0, 1030, 5, (1, 2)), (0.0, 1030, 5, (3, 4)))
    assert router.judge(first, 0, 0.0)
    assert not router.judge(second, 0, 0.0)
    assert router.ledger.load(0).requests == 2


# ---- one engine, by hand


@cache
def chain(blocks: int, of: int = 0) -> tuple[int, ...]:
    return tuple(range(of * 1000, of * 1000 + blocks))


ONE = SimulatedFleet(engines=1, capacity=60)


def test_a_prompt_alone() -> None:
    (job,) = run(requests((1.0, 10_000, 11, chain(19))), fleet=ONE).jobs
    assert job.prefill_starts_s == 1.0
    assert job.first_token_s == pytest.approx(2.0)
    assert job.done_s == pytest.approx(2.0 + 10 * (STEP_S + 20 * BLOCK_S))


def test_a_second_prompt_waits_and_shares_the_steps() -> None:
    asked = requests((0.0, 10_000, 1000, chain(19)), (0.0, 10_000, 1, chain(19, 1)))
    first, second = run(asked, fleet=ONE).jobs
    assert second.prefill_starts_s == first.first_token_s == pytest.approx(1.0)
    # The first request has 22 blocks, the second 20. Both decode in the same steps.
    chunks = 1.0 / CHUNK_S
    assert second.first_token_s == second.done_s
    assert second.done_s == pytest.approx(2.0 + chunks * (STEP_S + 42 * BLOCK_S))
    left = 999 - chunks
    assert first.done_s == pytest.approx(second.done_s + left * (STEP_S + 22 * BLOCK_S))


def test_what_is_cached_is_not_computed_again() -> None:
    blocks = chain(10)
    asked = requests((0.0, 5120, 1, blocks), (5.0, 5120, 1, blocks), (9.0, 2000, 1, blocks[:3]))
    jobs = run(asked, fleet=ONE).jobs
    # Of a prompt that is cached whole, the last block is computed for its last token's output.
    assert [job.hit_tokens for job in jobs] == [0, 9 * BLOCK_SIZE, 3 * BLOCK_SIZE]
    assert jobs[1].first_token_s == pytest.approx(5.0 + BLOCK_SIZE / 10_000)


def test_the_least_recently_used_leaf_is_evicted() -> None:
    small = SimulatedFleet(engines=1, capacity=30)
    asked = requests(
        (0.0, 5130, 1, chain(10)),
        (10.0, 5130, 1, chain(10, 1)),
        (20.0, 5130, 1, chain(10)),  # used again
        (30.0, 8200, 1, chain(16, 2)),  # takes 17 blocks, 7 more than are free
    )
    cache_ = run(asked, fleet=small).engines[0].cache
    assert cache_.held(chain(10)) == 10
    assert cache_.held(chain(10, 1)) == 3
    assert cache_.held(chain(16, 2)) == 16


def test_who_finds_no_room_waits_for_it() -> None:
    small = SimulatedFleet(engines=1, capacity=30)
    asked = requests((0.0, 10_000, 500, chain(19)), (0.0, 10_000, 1, chain(19, 1)))
    first, second = run(asked, fleet=small).jobs
    assert second.prefill_starts_s == first.done_s
    with pytest.raises(ValueError, match="needs more blocks than an engine has: 31"):
        run(requests((0.0, 15_600, 1, chain(30))), fleet=small)


# ---- recorded requests


def test_arrivals_can_be_compressed(tmp_path: Path) -> None:
    path = conversations(tmp_path)
    assert [request.arrival_s for request in read(path, limit=3)] == [0.0, 0.25, 0.5]
    assert [request.arrival_s for request in read(path, limit=3, speed_up=2.0)] == [0, 0.125, 0.25]


def test_equal_arrivals_come_in_any_order_and_nobody_overtakes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    at = [0, 0, 0, 3000, 3000, 9000]
    rows = [{"timestamp": ms, "input_length": 9, "output_length": 1, "hash_ids": []} for ms in at]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    orders = set()
    for seed in range(20):
        asked = read(path, seed, spread_s=3.0)
        names = [request.name for request in asked]
        orders.add(tuple(names))
        assert {*names[:3]} == {"r0", "r1", "r2"} and {*names[3:5]} == {"r3", "r4"}
        for request in asked:
            recorded_s = at[int(request.name[1:])] / 1000
            assert recorded_s <= request.arrival_s <= recorded_s + 3.0
    assert len(orders) > 5
    assert read(path, 1, spread_s=3.0) == read(path, 1, spread_s=3.0)


def test_only_requests_of_some_windows_count(tmp_path: Path) -> None:
    path = conversations(tmp_path)
    every = read(path)
    found = {}
    for windows in Windows:
        traffic = Traffic(path, windows=windows, window_s=3.0, spread_s=0.0, speed_up=2.0)
        found[windows] = [
            request.name for request in traffic.requests(1) if traffic.counts(request)
        ]
    assert sorted(found[Windows.ODD] + found[Windows.EVEN]) == sorted(each.name for each in every)
    assert found[Windows.ALL] == [each.name for each in every]
    assert found[Windows.ODD][:9] == [f"r{number}" for number in (*range(8), 16)]
    outcome = replay(every, FLEET, CoreRouter(FLEET, Settings(), 1))
    with pytest.raises(ReplayError, match="no request falls into the counted windows"):
        measure(outcome, lambda request: False)


def test_prompts_can_be_made_unique_and_outputs_longer(tmp_path: Path) -> None:
    path = conversations(tmp_path)
    changed = read(path, unique_prompts=True, output_scale=3.0)
    assert reusable_share(changed, BLOCK_SIZE) == 0
    assert [len(each.blocks) for each in changed] == [len(each.blocks) for each in read(path)]
    assert [each.output_tokens for each in changed[:2]] == [15, 18]
    assert len({mixed(number) for number in range(1000)}) == 1000


def trace_line(**members: object) -> str:
    """Returns a line of a trace in Mooncake's form."""
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    return json.dumps(row | members)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("{\n", "line 1"),
        ("[]\n", "line 1: not a JSON object"),
        ("[" * 100_000, "line 1: arrays or objects are nested too deeply"),
        ('{"timestamp": 1}\n', "neither a trace in Mooncake's form nor a decision log"),
        (trace_line(timestamp=nan), "timestamp: nan"),
        (trace_line(timestamp=inf), "timestamp: inf"),
        (trace_line(timestamp=10**400), "neither a trace"),
        (trace_line(input_length=-1), "input_length: -1"),
        (trace_line(input_length=10**30), "input_length: 1"),
        (trace_line(output_length="many"), "output_length: many"),
    ],
)
def test_what_is_no_trace_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ReplayError, match=message):
        read(path)
    with pytest.raises(ReplayError, match="No such file"):
        read(tmp_path / "none")


def test_prompts_without_tokens_have_no_cached_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(trace_line(input_length=0, hash_ids=[]))
    assert main(["replay", str(path), "--policy=kvd", "--jobs=1"]) == 0
    assert "| kvd | – |" in capsys.readouterr().out


# ---- fleets and routers


def test_engines_of_two_speeds() -> None:
    slow = SimulatedFleet(engines=1, capacity=60, factors=(0.5,))
    (job,) = run(requests((1.0, 10_000, 11, chain(19))), fleet=slow).jobs
    assert job.first_token_s == pytest.approx(3.0)
    assert job.done_s == pytest.approx(3.0 + 20 * (STEP_S + 20 * BLOCK_S))
    assert Speed().times(1.0) == Speed()


def test_an_engine_that_joins_is_not_chosen_before() -> None:
    routing = Routing(Chooser("least-loaded"), joins_s=1.5)
    asked = requests(*((float(number), 600, 500, chain(1, number)) for number in range(4)))
    outcome = replay(asked, SimulatedFleet(engines=2), routing.router(SimulatedFleet(engines=2), 1))
    assert outcome.chosen[:2] == [0, 0]
    assert outcome.chosen[2] == 1


class RecordingReceiver:
    """A router that records the events it gets."""

    def __init__(self) -> None:
        self.heard: list[tuple[int, Event, float]] = []

    def hear(self, engine: int, event: Event, now: float) -> None:
        self.heard.append((engine, event, now))

    def route(self, request: RecordedRequest, held: Callable[[], list[int]], now: float) -> int:
        return 0

    def prefill_complete(self, request: RecordedRequest) -> None: ...

    def finished(self, request: RecordedRequest) -> None: ...


def test_late_events_keep_their_order() -> None:
    receiver = RecordingReceiver()
    late = Delayed(receiver, 1, (0.1, 0.2), 1)
    events = [Stored([number], None) for number in range(5)]
    for number, event in enumerate(events):
        late.hear(0, event, number / 100)
    (asked,) = requests((0.0, 600, 1, chain(1)))
    late.route(asked, list, 0.09)
    assert receiver.heard == []
    late.route(asked, list, 0.3)
    assert receiver.heard == [(0, event, number / 100) for number, event in enumerate(events)]


@pytest.mark.parametrize("synced", [True, False])
def test_several_routers_know_of_each_other_by_sync(synced: bool) -> None:
    made = [CoreRouter(FLEET, Settings(), seed) for seed in (1, 2)]
    several = SeveralRouters(made, 1, synced=synced)
    asked = requests(*((0.0, 1030, 5, chain(2, number)) for number in range(12)))
    for request in asked:
        several.route(request, list, 0.0)
    live = [router.ledger.stats()["requests"] for router in made]
    assert live == [12, 12] if synced else sum(live) == 12 and min(live) > 0
    for request in asked:
        several.prefill_complete(request)
        several.finished(request)
    assert [router.ledger.stats()["requests"] for router in made] == [0, 0]


def test_policies_by_name() -> None:
    policy = policies.parse("kvd,hold_up=0.5")
    assert policy.settings().members["hold_up"] == 0.5
    assert str(policy) == "kvd,hold_up=0.5"
    for text in (
        "best",
        "kvd,hold_up",
        "kvd,hold_up=many",
        "kvd,height=1",
        "dynamo,temperature=-1",
    ):
        with pytest.raises(ReplayError):
            policies.parse(text)


# ---- the command


def test_the_command_prints_the_same_tables_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = conversations(tmp_path)
    picture, figures = tmp_path / "picture.svg", tmp_path / "figures.json"
    options = ["--engines", "3", "--capacity", "60", "--rounds", "2", "--jobs", "1"]
    output = ["--plot", str(picture), "--json", str(figures)]
    printed = []
    for _ in range(2):
        assert (
            main(["replay", str(path), *options, *output, "--policy=dynamo", "--policy=kvd"]) == 0
        )
        captured = capsys.readouterr()
        printed.append(captured.out)
        assert captured.err == ""  # no progress bar, as the output is no terminal
    assert printed[0] == printed[1]
    lines = printed[0].splitlines()
    assert lines[0] == (
        "- requests: 48 in 17 s, 48 of them counted, 4,103 prompt tokens each; one cache without "
        "bounds would have had 74.6%"
    )
    assert [line.split(" | ")[0] for line in lines if line.startswith("| ")] == [
        "| policy",
        "| dynamo",
        "| kvd",
        "| by dynamo",
        "| kvd",
    ]
    held = json.loads(figures.read_text())
    assert {name: len(rounds) for name, rounds in held.items()} == {"dynamo": 2, "kvd": 2}
    assert f"| dynamo | {sum(each['cached'] for each in held['dynamo']) / 2:.1%} |" in printed[0]
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")


@pytest.mark.parametrize("arguments", [("",), ("trace", "--plot="), ("trace", "--json=")])
def test_a_file_needs_a_name(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["replay", *arguments])
    assert "expected the name of a file" in capsys.readouterr().err


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "figures"
    assert main(["replay", str(tmp_path / "none"), f"--json={figures}"]) == 1
    assert "No such file" in capsys.readouterr().err
    assert not figures.exists()
    path = conversations(tmp_path)
    for option in ("--plot", "--json"):  # before the replay, whose capacity is too small
        nowhere = tmp_path / "none" / "file"
        assert main(["replay", str(path), "--capacity=5", "--jobs=1", f"{option}={nowhere}"]) == 1
        assert capsys.readouterr().err == f"kvd: {nowhere}: No such file or directory\n"
    assert main(["replay", str(path), "--capacity", "5", "--jobs", "1"]) == 1
    assert "needs more blocks than an engine has" in capsys.readouterr().err
    assert main(["replay", str(path), "--engines", "1", "--joins", "5", "--jobs", "1"]) == 1
    assert "--joins needs at least two engines" in capsys.readouterr().err
    for wrong in (["--policy", "best"], ["--event-delay-ms", "5-1"], ["--windows", "some"]):
        with pytest.raises(SystemExit):
            main(["replay", str(path), *wrong])
        assert wrong[0] in capsys.readouterr().err


def test_ratios_that_are_noise_are_marked() -> None:
    assert span([1.01, 0.99]) == "= 1.00 (0.99–1.01)"
    assert span([0.8, 0.9]) == "0.85 (0.80–0.90)"
    assert span([1.3]) == "1.30"
    assert span([float("nan")]) == "–"


def test_the_bar() -> None:
    assert line(0.0, 0.0).startswith("replaying [" + "." * 30 + "]   0%")
    assert "[" + "#" * 15 + "." * 15 + "]  50%  4 s left" in line(0.5, 4.0)
    assert line(2.0, 4.0).startswith("replaying [" + "#" * 30 + "] 100%")


def test_a_bar_is_drawn_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(progress, "REDRAWN_S", 0.0)
    for to, drawn in ((Terminal(), True), (StringIO(), False)):
        bar = ProgressBar(10, to)
        bar.advance(5)
        bar.close()
        assert ("50%" in to.getvalue()) == drawn
        assert to.getvalue().endswith("\r\x1b[K" if drawn else "")
