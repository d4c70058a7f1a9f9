"""Random histories of sessions, a datastore and operations, against a dictionary of what there must be."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from running import PATIENCE_S, RunningServer
from texts import make_text

from memlm.api.datastores import NewDocument
from memlm.api.operations import JobState
from memlm.client import Client
from memlm.errors import AlreadyExists, NotFound

WORDS = st.sampled_from(["the memory", " of a model", " can be read", " and edited"])
NUMBERS = st.integers(0, 11)


@pytest.fixture(scope="module")
def at(
    tmp_path_factory: pytest.TempPathFactory, model_folder: Path, corpus_folder: Path
) -> Iterator[tuple[RunningServer, Path]]:
    stores = tmp_path_factory.mktemp("histories") / "stores"
    options = ("--threads", "1", "--workers", "2", "--store-dir", str(stores), "--corpus-root", str(corpus_folder))
    options += ("--session-dir", str(stores.parent / "sessions"))
    with RunningServer(stores.parent / "log", model_folder, options=options) as server:
        yield server, corpus_folder


def machine(server: RunningServer, corpus: Path) -> type[RuleBasedStateMachine]:
    """Histories at that server. Each begins with a datastore of its own."""

    class History(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.client = Client(server.address)
            self.sessions: dict[str, list[int]] = {}
            self.jobs: dict[str, tuple[str, bool]] = {}
            self.client.datastores.build("docs", str(corpus), replace=True).result(PATIENCE_S)
            self.documents = {f"doc-{number}.txt" for number in range(8)}

        def teardown(self) -> None:
            for name in self.sessions:
                self.client.delete_session(name)
            for info in self.client.operations.list():
                self.client.operations.delete(info.name)
            self.client.close()

        def named(self, pick: int) -> str:
            return sorted(self.sessions)[pick % len(self.sessions)]

        def did(self, job: Any, *, well: bool) -> None:
            """An operation that ended as it must."""
            info = job.wait(60)
            assert info.state == (JobState.DONE if well else JobState.FAILED), info
            self.jobs[job.name] = (info.kind, well)

        @rule()
        def create(self) -> None:
            self.sessions[self.client.session().name] = []

        @precondition(lambda self: self.sessions)
        @rule(pick=NUMBERS, text=WORDS)
        def append(self, pick: int, text: str) -> None:
            name, tokens = self.named(pick), self.client.tokenize(text)
            self.sessions[name] = [*self.sessions[name], *tokens]
            assert self.client.append_to_session(name, text).num_tokens == len(self.sessions[name])

        @precondition(lambda self: self.sessions)
        @rule(pick=NUMBERS, count=st.integers(1, 4))
        def generate(self, pick: int, count: int) -> None:
            """What a session goes on with is what its tokens, read anew, go on with."""
            name = self.named(pick)
            with self.client.generate("", session=name, temperature=0, max_tokens=count, use_store=False) as stream:
                drawn = [token.id for token in stream]
            with self.client.session() as twin:
                if self.sessions[name]:
                    self.client.append_to_session(twin.name, token_ids=self.sessions[name])
                with twin.generate("", temperature=0, max_tokens=count, use_store=False) as again:
                    assert [token.id for token in again] == drawn
            self.sessions[name] = self.sessions[name] + drawn

        @precondition(lambda self: any(self.sessions.values()))
        @rule(pick=NUMBERS, places=st.tuples(NUMBERS, NUMBERS))
        def forget_span(self, pick: int, places: tuple[int, int]) -> None:
            filled = sorted(name for name, tokens in self.sessions.items() if tokens)
            name = filled[pick % len(filled)]
            tokens = self.sessions[name]
            start = places[0] % len(tokens)
            stop = start + 1 + places[1] % (len(tokens) - start)
            self.sessions[name] = [*tokens[:start], *tokens[stop:]]
            assert self.client.forget_in_session(name, start, stop).num_tokens == len(self.sessions[name])

        @precondition(lambda self: self.sessions)
        @rule(pick=NUMBERS)
        def fork(self, pick: int) -> None:
            name = self.named(pick)
            self.sessions[self.client.fork_session(name).name] = list(self.sessions[name])

        @precondition(lambda self: self.sessions)
        @rule(pick=NUMBERS)
        def forget(self, pick: int) -> None:
            name = self.named(pick)
            self.client.delete_session(name)
            del self.sessions[name]
            with contextlib.suppress(NotFound):
                self.client.get_session(name)
                raise AssertionError("a session that was deleted is there")

        @rule(number=NUMBERS, replace=st.booleans())
        def add(self, number: int, replace: bool) -> None:
            id_ = f"new-{number % 3}"
            job = self.client.datastores.add("docs", [NewDocument(id_, make_text(number, 30))], replace=replace)
            self.did(job, well=replace or id_ not in self.documents)
            self.documents.add(id_)

        @rule(number=NUMBERS)
        def delete(self, number: int) -> None:
            id_ = f"doc-{number}.txt" if number < 8 else f"new-{number % 3}"
            if id_ in self.documents and len(self.documents) > 1:
                assert self.client.datastores.delete_documents("docs", [id_]).num_documents == 1
                self.documents.remove(id_)
            elif id_ not in self.documents:
                with contextlib.suppress(NotFound):
                    self.client.datastores.delete_documents("docs", [id_])
                    raise AssertionError("a document that is not there was deleted")

        @rule()
        def compact(self) -> None:
            self.did(self.client.datastores.compact("docs"), well=True)

        @rule()
        def build_again(self) -> None:
            with contextlib.suppress(AlreadyExists):
                self.client.datastores.build("docs", str(corpus))
                raise AssertionError("a datastore took another's place unasked")

        @invariant()
        def all_is_as_it_must_be(self) -> None:
            listed = {info.name: info.num_tokens for info in self.client.list_sessions()}
            assert listed == {name: len(tokens) for name, tokens in self.sessions.items()}
            assert self.client.datastores.get("docs").num_documents == len(self.documents)
            found = self.client.search("docs", "the memory of a model", k=64)
            assert {neighbor.document_id for neighbor in found} <= self.documents
            jobs = {info.name: (info.kind, info.state == JobState.DONE) for info in self.client.operations.list()}
            assert {name: jobs[name] for name in self.jobs} == self.jobs

    return History


def check(at: tuple[RunningServer, Path], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine(*at),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_random_histories_are_as_they_must_be(at: tuple[RunningServer, Path]) -> None:
    check(at, 2, 12)


@pytest.mark.slow
def test_many_random_histories_are_as_they_must_be(at: tuple[RunningServer, Path]) -> None:
    check(at, 40, 50)
