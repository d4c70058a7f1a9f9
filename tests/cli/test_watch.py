"""`--watch`: when files are looked at again, by a clock that the test moves."""

from collections.abc import Callable
from pathlib import Path

import pytest

from memlm.cli.store import sync
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput, Overloaded


class Stop(BaseException):
    """Ends the watch."""


class Ticking:
    """The time of a process that only sleeps, while something happens to the files."""

    def __init__(self, happens: Callable[[int], None] = lambda slept: None) -> None:
        self.now_s, self._slept, self._happens = 0.0, 0, happens

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        if self._slept > 100:
            raise Stop
        self._slept += 1
        self.now_s += seconds
        self._happens(self._slept)


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("a")
    return tmp_path


def watch(docs: Path, clock: Ticking, monkeypatch: pytest.MonkeyPatch, most: int) -> list[float]:
    """When it read the documents, at most so many times."""
    monkeypatch.setattr(sync, "time", clock)
    times = list[float]()

    def do() -> None:
        if len(times) == most:
            raise Stop
        times.append(clock.now_s)
        assert list(Corpus([docs]))

    with pytest.raises(Stop):
        sync.at_each_change(Corpus([docs]), do, watch=True)
    return times


def test_a_change_is_taken_once_no_file_is_written_any_more(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(slept: int) -> None:
        if slept in (5, 6):
            (docs / "a.txt").write_text("a" * (slept + 1))

    assert watch(docs, Ticking(write), monkeypatch, 5) == [0.0, 14.0]


def test_files_that_change_without_end_are_read_within_ten_seconds(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(slept: int) -> None:
        with (docs / "log.txt").open("a") as log:
            log.write("line\n")

    assert watch(docs, Ticking(write), monkeypatch, 4) == [0.0, 10.0, 20.0, 30.0]


def test_what_hinders_a_watch_is_told_once_and_ends_nothing(
    docs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(slept: int) -> None:
        if slept == 3:
            (docs / ".gitignore").write_bytes(b"x" * (2 << 20))
        if slept == 20:
            (docs / ".gitignore").unlink()

    assert watch(docs, Ticking(write), monkeypatch, 5) == [0.0, 8.0, 42.0]
    assert capsys.readouterr().err.count(".gitignore") == 1
    (docs / ".gitignore").write_bytes(b"x" * (2 << 20))
    with pytest.raises(InvalidInput, match="gitignore"):
        sync.at_each_change(Corpus([docs]), lambda: [*Corpus([docs])] and None, watch=False)


def test_what_passes_by_itself_is_tried_again_while_no_file_changes(
    docs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where another operation makes the datastore."""
    clock, times = Ticking(lambda slept: None), list[float]()
    monkeypatch.setattr(sync, "time", clock)

    def do() -> None:
        times.append(clock.now_s)
        if len(times) <= 2:
            raise Overloaded("is being made")

    with pytest.raises(Stop):
        sync.at_each_change(Corpus([docs]), do, watch=True)
    assert times == [0.0, 4.0, 8.0]
    assert capsys.readouterr().err.count("is being made") == 2
