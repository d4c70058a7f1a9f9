"""How long sessions live, and how many there may be."""

import time
from pathlib import Path

import pytest

from memlm.base.clock import Clock
from memlm.base.steps import run_steps
from memlm.errors import NotFound, Overloaded
from memlm.generation.sessions.names import SessionNames, home_of, names_in, suffix_of
from memlm.generation.sessions.sessions import EXPIRED_AT_ONCE, Sessions

TEXT = "the memory of a model can be read and edited"


class SetClock(Clock):
    """A monotonic clock that a test moves, of a machine that a test restarts."""

    def __init__(self, at_s: float = 1000.0, boot: str = "first") -> None:
        self.at_s, self._boot = at_s, boot

    def now_s(self) -> float:
        return self.at_s


def test_a_step_of_the_wall_clock_drops_no_session(checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = Sessions(checkpoint, folder=tmp_path, ttl_s=60)
    name = run_steps(sessions.create()).name
    monkeypatch.setattr(time, "time", lambda: 1e10)
    sessions.expire()
    assert [info.name for info in sessions.list()] == [name]
    assert len(list(tmp_path.glob("*.session"))) == 1
    again = Sessions(checkpoint, folder=tmp_path, ttl_s=60)
    again.expire()
    assert again.get(name).name == name


def test_a_lifetime_goes_on_after_a_restart_of_the_process(checkpoint, tmp_path: Path) -> None:
    sessions = Sessions(checkpoint, folder=tmp_path, ttl_s=60, clock=SetClock(at_s=1000))
    name = run_steps(sessions.create()).name
    assert Sessions(checkpoint, folder=tmp_path, clock=SetClock(at_s=1059)).get(name).name == name
    with pytest.raises(NotFound, match="not used for 60 s"):
        Sessions(checkpoint, folder=tmp_path, clock=SetClock(at_s=1061)).get(name)
    assert list(tmp_path.glob("*.session")) == []


def test_a_lifetime_starts_anew_after_a_reboot(checkpoint, tmp_path: Path) -> None:
    """How long the machine was off, only the wall clock knows; and what is dropped too early is lost."""
    sessions = Sessions(checkpoint, folder=tmp_path, ttl_s=60, clock=SetClock(at_s=1000))
    name = run_steps(sessions.create()).name
    clock = SetClock(at_s=5, boot="second")
    again = Sessions(checkpoint, folder=tmp_path, clock=clock)
    clock.at_s = 64
    assert again.get(name).name == name
    clock.at_s = 66
    with pytest.raises(NotFound):
        again.get(name)


def test_use_prolongs_a_session_and_what_is_in_use_stays(checkpoint) -> None:
    clock = SetClock()
    sessions = Sessions(checkpoint, ttl_s=60, clock=clock)
    used, held, idle = (run_steps(sessions.create()).name for _ in range(3))
    clock.at_s += 50
    run_steps(sessions.append(used, TEXT))
    lease = sessions.lease(held)
    clock.at_s += 50
    sessions.expire()
    assert {info.name for info in sessions.list()} == {used, held}
    clock.at_s += 50
    sessions.expire()
    assert {info.name for info in sessions.list()} == {held}
    lease.end(None)
    clock.at_s += 61
    sessions.expire()
    assert len(sessions) == 0
    with pytest.raises(NotFound, match="not used for"):
        sessions.get(idle)


def test_expiry_looks_at_sessions_that_are_due_only(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """And drops a bounded number at once; the others are not to be had meanwhile."""
    clock, looks = SetClock(), list[str]()
    sessions = Sessions(checkpoint, ttl_s=60, clock=clock)
    names = [run_steps(sessions.create()).name for _ in range(3 * EXPIRED_AT_ONCE)]
    is_over = Sessions._is_over
    monkeypatch.setattr(Sessions, "_is_over", lambda self, each: looks.append(each.name) or is_over(self, each))
    sessions.expire()
    assert looks == []
    late = run_steps(sessions.create(ttl_s=1000)).name
    clock.at_s += 61
    sessions.expire()
    assert len(sessions) == 2 * EXPIRED_AT_ONCE + 1
    assert len(looks) <= EXPIRED_AT_ONCE
    assert [info.name for info in sessions.list()] == [late]
    with pytest.raises(NotFound, match="not used for"):
        sessions.get(names[-1])
    for _ in range(3):
        sessions.expire()
    assert len(sessions) == 1


def test_sessions_that_come_and_go_leave_no_trace(checkpoint) -> None:
    sessions = Sessions(checkpoint, ttl_s=60)
    kept, before = run_steps(sessions.create()).name, sessions.num_bytes
    for _ in range(1000):
        run_steps(sessions.delete(run_steps(sessions.create(owner=str(_))).name, owner=str(_)))
    assert (len(sessions), sessions.num_bytes) == (1, before)
    assert len(sessions._expiring) < 300
    assert list(sessions._of_owner) == [""]
    assert sessions.get(kept).name == kept


def test_a_caller_has_no_more_sessions_than_it_may(checkpoint) -> None:
    sessions = Sessions(checkpoint, max_per_owner=3, max_sessions=5)
    names = [run_steps(sessions.create(owner="ann")).name for _ in range(3)]
    for use in (
        lambda: run_steps(sessions.create(owner="ann")),
        lambda: run_steps(sessions.fork(names[0], owner="ann")),
    ):
        with pytest.raises(Overloaded, match=r"max_sessions_per_caller.*delete"):
            use()
    for _ in range(2):
        run_steps(sessions.create(owner="ben"))
    with pytest.raises(Overloaded, match=r"5 sessions.*max_sessions"):
        run_steps(sessions.create(owner="eve"))
    run_steps(sessions.delete(names[0], owner="ann"))
    assert run_steps(sessions.create(owner="ann")).name in {info.name for info in sessions.list(owner="ann")}


def test_an_empty_session_counts_and_the_total_stays_right(checkpoint) -> None:
    sessions = Sessions(checkpoint)
    names = [run_steps(sessions.create()).name for _ in range(4)]
    assert min(info.num_bytes for info in sessions.list()) > 1000
    for name in names[:2]:
        run_steps(sessions.append(name, TEXT))
    run_steps(sessions.fork(names[0]))
    assert sessions.num_bytes == sum(info.num_bytes for info in sessions.list())
    run_steps(sessions.delete(names[0]))
    assert sessions.num_bytes == sum(info.num_bytes for info in sessions.list())


def test_what_an_interrupted_write_left_is_removed(checkpoint, tmp_path: Path) -> None:
    name = run_steps(Sessions(checkpoint, folder=tmp_path).create()).name
    for left in (f"{name}.session.0123abcd.tmp", "feed.session.0123abcd.tmp"):
        (tmp_path / left).write_text("a secret")
    Sessions(checkpoint, folder=tmp_path, names=SessionNames(lambda each: each == name))
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.session", "feed.session.0123abcd.tmp"}


def test_a_session_is_adopted_from_its_file(checkpoint, tmp_path: Path) -> None:
    """As if it had always been there, and once. Names tell whose they are."""
    names = [SessionNames(lambda name, home=home: home_of(name) == home, suffix_of(home)) for home in ("one", "two")]
    one, two = (Sessions(checkpoint, folder=tmp_path, names=each) for each in names)
    name = run_steps(one.create(owner="ann")).name
    info = run_steps(one.append(name, TEXT, owner="ann"))
    assert name.endswith("-one")
    assert names_in(tmp_path) == [name]
    assert len(Sessions(checkpoint, folder=tmp_path, names=names[1])) == 0
    (tmp_path / f"{name}.session.0123abcd.tmp").write_text("a secret")
    for _ in range(2):
        two.adopt(two.read_file(name))
    assert len(two) == 1
    assert two.num_bytes == one.num_bytes
    there = two.get(name, owner="ann")
    assert (there.num_tokens, there.created_s) == (info.num_tokens, info.created_s)
    assert there.used_s == pytest.approx(info.used_s, abs=60)
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.session"]
    two.adopt(two.read_file("no such session"))
    Sessions(checkpoint).adopt(Sessions(checkpoint).read_file(name))
    assert len(two) == 1
