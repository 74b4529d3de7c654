"""Bindings of sessions by example; two replicas end up with the same ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvd.selection.sessions import Binding, Sessions
from kvd.wire.affinity import Version

TTL_S = 10.0
ME, OTHER = 7, 9
WALL = 10**18


def target(sessions: Sessions[str], now: float, key: str = "s") -> tuple[int, int | None] | None:
    binding = sessions.find(key, now)
    return None if binding is None else (binding.worker_id, binding.dp_rank)


def test_a_lease_holds_and_the_time_begins_at_its_end() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    binding = sessions.bind("s", 1, 0, ME, WALL)
    assert target(sessions, 1e9) == (1, 0)
    sessions.lease("s", binding)
    assert sessions.release("s", binding, 50.0)
    assert target(sessions, 1e9) == (1, 0)
    assert sessions.release("s", binding, 60.0)
    assert target(sessions, 60.0 + TTL_S - 0.1) == (1, 0)
    assert target(sessions, 60.0 + TTL_S) is None
    assert target(sessions, 60.0, "t") is None


def test_an_idle_session_is_held_again() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    binding = sessions.bind("s", 1, 0, ME, WALL)
    sessions.release("s", binding, 0.0)
    sessions.lease("s", binding)
    assert target(sessions, 1e9) == (1, 0)
    assert not sessions.expire(1e9, 10)
    assert len(sessions) == 1


def test_a_lease_of_an_earlier_binding_ends_nothing() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    first = sessions.bind("s", 1, 0, ME, WALL)
    second = sessions.bind("s", 2, 0, ME, WALL)
    assert second.version > first.version
    assert not sessions.release("s", first, 0.0)
    assert target(sessions, 1e9) == (2, 0)
    assert sessions.release("s", second, 0.0)
    assert target(sessions, TTL_S) is None


def test_what_is_too_old_is_forgotten_in_slices() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    for number in range(5):
        sessions.release(str(number), sessions.bind(str(number), 1, 0, ME, WALL), float(number))
    sessions.bind("held", 1, 0, ME, WALL)
    assert sessions.expire(TTL_S + 3, 3)
    assert len(sessions) == 3
    assert not sessions.expire(TTL_S + 3, 3)
    assert len(sessions) == 2
    assert not sessions.expire(1e9, 3)
    assert len(sessions) == 1


def test_the_table_is_bounded() -> None:
    sessions: Sessions[str] = Sessions(TTL_S, max_sessions=3)
    for number in range(3):
        sessions.release(str(number), sessions.bind(str(number), number, 0, ME, WALL), 0.0)
    sessions.lease("0", sessions._idle["0"])
    sessions.bind("3", 3, 0, ME, WALL)
    assert (len(sessions), sessions.dropped) == (3, 1)
    assert [target(sessions, 0.0, str(number)) for number in range(4)] == [
        (0, 0),
        None,
        (2, 0),
        (3, 0),
    ]
    for number in range(4, 8):
        sessions.bind(str(number), 1, 0, ME, WALL)
    assert (len(sessions), sessions.dropped) == (3, 5)


def test_sequences_only_grow() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    assert sessions.bind("a", 1, 0, ME, WALL).version == (WALL, ME)
    assert sessions.bind("b", 1, 0, ME, WALL - 5).version == (WALL + 1, ME)
    assert not sessions.apply("a", 2, 0, Version(5, OTHER), 0.0)
    sessions.apply("c", 1, 0, Version(WALL + 100, OTHER), 0.0)
    assert sessions.bind("d", 1, 0, ME, WALL).version == (WALL + 101, ME)


def test_the_newer_binding_wins() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    version = Version(WALL, OTHER)
    assert sessions.apply("s", 1, None, version, 0.0)
    assert target(sessions, 0.0) == (1, None)
    assert sessions.apply("s", 1, None, version, 5.0)  # the same version renews the time to live
    assert target(sessions, 5.0 + TTL_S - 0.1) == (1, None)
    assert not sessions.apply("s", 2, 0, Version(WALL - 1, OTHER), 5.0)
    assert not sessions.apply("s", 2, 0, Version(WALL, OTHER - 1), 5.0)
    assert sessions.apply("s", 2, 0, Version(WALL, OTHER + 1), 5.0)
    assert target(sessions, 5.0) == (2, 0)


def test_a_replica_does_not_end_a_lease_of_the_same_rank() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    binding = sessions.bind("s", 1, 0, ME, WALL)
    assert sessions.apply("s", 1, 0, Version(WALL + 5, OTHER), 0.0)
    assert target(sessions, 1e9) == (1, 0)
    assert sessions.release("s", binding, 0.0)
    assert binding.version == (WALL + 5, OTHER)


def test_a_replica_takes_over_a_session_under_way() -> None:
    sessions: Sessions[str] = Sessions(TTL_S)
    binding = sessions.bind("s", 1, 0, ME, WALL)
    assert sessions.apply("s", 2, 0, Version(WALL + 5, OTHER), 0.0)
    assert target(sessions, 0.0) == (2, 0)
    assert not sessions.release("s", binding, 0.0)
    assert target(sessions, TTL_S) is None


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("bind", "follow", "release")),
        st.integers(0, 1),  # which replica
        st.sampled_from("st"),
        st.integers(1, 3),
    ),
    max_size=30,
)


@given(STEPS)
def test_replicas_that_hear_all_agree(steps: list[tuple[str, int, str, int]]) -> None:
    replicas: list[Sessions[str]] = [Sessions(TTL_S), Sessions(TTL_S)]
    leases: list[list[tuple[str, Binding]]] = [[], []]
    for step, at, key, worker_id in steps:
        mine, theirs = replicas[at], replicas[1 - at]
        binding = mine.find(key, 0.0)
        if step == "bind":
            binding = mine.bind(key, worker_id, 0, at + 1, WALL - at * 50)
            leases[at].append((key, binding))
        elif step == "follow" and binding is not None:
            mine.lease(key, binding)
            leases[at].append((key, binding))
        elif step == "release" and leases[at]:
            key, binding = leases[at].pop(0)
            if not mine.release(key, binding, 0.0):
                continue
        else:
            continue
        place = binding.worker_id, binding.dp_rank
        assert theirs.apply(key, *place, binding.version, 0.0)
        for each in "st":
            assert target(mine, 0.0, each) == target(theirs, 0.0, each)
    for at, held in enumerate(leases):
        for lease in held:
            replicas[at].release(*lease, 0.0)
        assert not replicas[at].expire(TTL_S, 100)
        assert len(replicas[at]) == 0
