"""The runner itself: it tells apart what scenarios expect and what they do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.conformance.failure import BadScenario, Failure
from tests.conformance.matcher import difference
from tests.conformance.responses import unmet
from tests.conformance.steps import Stage, Step, Target
from tests.support.http_client import Client


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        ({"a": 1, "b": [2, None]}, {"b": [2, None], "a": 1.0}),
        ({"a": {"$any": True}}, {"a": None}),
        ({"a": {"$absent": True}}, {}),
        ({"a": {"$optional": 1}}, {}),
        ({"a": {"$optional": {"$type": "int"}}}, {"a": 1}),
        ({"$subset": {"a": {"b": 1}}}, {"a": {"b": 1, "c": 2}, "d": 3}),
        ({"$unordered": [{"$gte": 1}, 1]}, [1, 2]),
        ({"$all": [{"$gte": 1}, {"$lte": 3}, {"$type": "number"}]}, 2),
        ([{"$len": 2}, {"$regex": "^o.$"}], ["ab", "ok"]),
        ({"$contains": [{"$in": [1, 2]}, 3]}, [3, 2]),
        ({"$lacks": [4, True]}, [3, 1]),
        ({"$contains": ["ab"]}, "cab"),
    ],
)
def test_a_match(expected: Any, actual: Any) -> None:
    assert difference(expected, actual) is None


@pytest.mark.parametrize(
    ("expected", "actual", "text"),
    [
        ({"a": 1}, {}, "$.a: missing"),
        ({"a": {"$any": True}}, {}, "$.a: missing"),
        ({}, {"a": 1}, "unexpected"),
        ({"a": {"$absent": True}}, {"a": None}, "$.a"),
        ({"a": {"$optional": 1}}, {"a": 2}, "$.a"),
        ([1, 2], [1, 3], "$[1]"),
        ([1], [1, 1], "1 items"),
        (1, True, "true"),
        ("1", 1, "$"),
        ({"$type": "int"}, True, "$type"),
        ({"$gte": 1}, "2", "$gte"),
        ({"$unordered": [1, 2]}, [1, 1], "no item"),
        ({"$unordered": [1]}, {}, "any order"),
        ({"$contains": [1]}, [2], "$contains"),
        ({"$lacks": ["a"]}, "cab", "$lacks"),
        ({"$lacks": ["a"]}, None, "$lacks"),
        ({"$in": [1, 2]}, 3, "$in"),
    ],
)
def test_a_difference(expected: Any, actual: Any, text: str) -> None:
    assert text in (difference(expected, actual) or "")


def test_metrics_are_found_by_name_and_labels_in_any_order() -> None:
    text = '# HELP a b\n# TYPE a gauge\na{x="1",y="}"} 3\nb 0.5 1700000000\n'
    response = httpx.Response(200, text=text)
    assert unmet({"metrics": {'a{y="}",x="1"}': 3, "b": {"$lte": 1}}}, response) is None
    assert unmet({"metrics": {'a{x="1"}': 3}}, response)
    assert unmet({"metrics": {'a{y="}",x="1"}': 4}}, response)
    assert unmet({"metrics": {"c": {"$absent": True}}}, response) is None


HEALTH = {"method": "GET", "path": "/health"}
WORKERS = {"method": "GET", "path": "/workers?model_name=nobody"}
AT_ONCE_S = 0.05


@pytest.mark.parametrize(
    "step",
    [
        {"http": HEALTH, "expect": {"status": [201, 204]}},
        {"http": HEALTH, "expect": {"error": True}},
        {"http": HEALTH, "expect": {"json": {}}},
        {"http": WORKERS, "expect": {"json": ["x"]}},
        {"http": WORKERS, "expect": {"empty": True}},
        {"http": WORKERS, "expect": {"body_lacks": ["]"]}},
        {"http": WORKERS, "expect": {"body_contains": "x"}},
        {"http": WORKERS, "expect": {"header": {"content-type": {"$absent": True}}}},
        {"http": {"method": "GET", "path": "/", "base": "http://127.0.0.1:1"}},
        {"until": {"http": WORKERS, "expect": {"status": 404}}, "within_s": AT_ONCE_S},
        {"holds": {"http": WORKERS, "expect": {"status": 404}}, "for_s": AT_ONCE_S},
        {"engine": "e", "bind": {}, "wait_subscribed": 1, "within_s": AT_ONCE_S},
        {"engine": "e", "bind": {}, "expect_replay_count": 1, "within_s": AT_ONCE_S},
        {"engine": "e", "bind": {}, "expect_subscriptions": [""]},
        {"engine": "e", "publish": {"seq": 0, "batch": []}},
    ],
    ids=str,
)
def test_what_is_not_so_fails(step: Step, kvd: Callable[[str], Target], client: Client) -> None:
    stage = Stage(kvd("indexer"), client)
    try:
        with pytest.raises(Failure):
            stage.play(step)
    finally:
        stage.close()


@pytest.mark.parametrize(
    "step",
    [
        {"jump": 1},
        {"http": HEALTH, "sleep_s": 1},
        {"http": HEALTH, "expect": {"jsn": []}},
        {"http": WORKERS, "expect": {"json": {"$like": 1}}},
    ],
    ids=str,
)
def test_what_is_no_step_is_refused(
    step: Step, kvd: Callable[[str], Target], client: Client
) -> None:
    with pytest.raises(BadScenario):
        Stage(kvd("indexer"), client).play(step)
