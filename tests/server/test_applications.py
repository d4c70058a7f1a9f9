"""Which servers of applications on a Ray cluster are gone, by what the cluster answers."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from memlm.server.ownership import new_name

ray_exceptions = pytest.importorskip("ray.exceptions")
pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'memlm[replicas]'")
applications = pytest.importorskip("memlm.server.inference.replicas.applications")

MISSING, THERE = ValueError("no such actor"), object()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Iterator[Any]]:
    """Lets the cluster give these answers, one after the other, to those who look for an actor."""
    monkeypatch.setattr(applications, "WATCH_S", 0.0)

    def give(*given: Any) -> Iterator[Any]:
        rest = iter(given)

        def get_actor(name: str, namespace: str) -> Any:
            if isinstance(answer := next(rest), Exception):
                raise answer
            return answer

        monkeypatch.setattr(applications.ray, "get_actor", get_actor)
        return rest

    return give


@pytest.mark.parametrize(
    ("given", "is_gone"),
    [
        ((MISSING, MISSING, MISSING), True),
        ((THERE,), False),
        ((MISSING, MISSING, THERE), False),
        ((MISSING, ray_exceptions.RpcError("of the cluster's head")), False),
    ],
)
def test_a_server_is_gone_that_three_looks_do_not_find(answers, given, is_gone) -> None:
    rest = answers(*given)
    assert applications.is_gone("one") == is_gone
    assert not list(rest)


def test_a_replica_looks_on_after_an_error_and_ends_with_its_server(answers, monkeypatch) -> None:
    """Errors of any kind say nothing of the server."""
    ended = list[Any]()
    rest = answers(THERE, RuntimeError("the cluster's head starts again"), MISSING, THERE, MISSING, MISSING, MISSING)
    monkeypatch.setattr(applications, "end", ended.append)
    monkeypatch.setattr(applications.os, "_exit", ended.append)
    applications.end_with_server("one")
    assert ended == ["one", 1]
    assert not list(rest)


def test_applications_of_other_programs_are_not_ended(answers, monkeypatch) -> None:
    """Neither by their names, nor by those of their deployments, nor while their server is there."""
    ours, theirs, ended = {"replica": object()}, {"gateway": object()}, list[str]()
    names = {each: new_name() for each in ("abandoned", "empty", "other", "served")}
    left = {
        names["abandoned"]: ours, names["empty"]: {}, names["other"]: theirs, names["served"]: ours, "memlm-one": ours,
    }  # fmt: skip
    status = SimpleNamespace(applications={name: SimpleNamespace(deployments=of) for name, of in left.items()})
    monkeypatch.setattr(applications.serve, "status", lambda: status)
    monkeypatch.setattr(applications, "end", ended.append)
    rest = answers(*6 * [MISSING], THERE)
    applications.end_abandoned()
    assert ended == [names["abandoned"], names["empty"]]
    assert not list(rest)


def test_the_application_that_had_the_session_folder_is_ended_at_once(answers, monkeypatch) -> None:
    """Its server has let go of the folder, though the cluster may not have noticed yet."""
    earlier, other = new_name(), new_name()
    status = SimpleNamespace(
        applications={name: SimpleNamespace(deployments={"replica": object()}) for name in (other, earlier)}
    )
    ended, rest = list[str](), answers(THERE)
    monkeypatch.setattr(applications.serve, "status", lambda: status)
    monkeypatch.setattr(applications, "end", ended.append)
    applications.end_abandoned(earlier)
    assert ended == [earlier]
    assert not list(rest)
