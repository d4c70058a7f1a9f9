"""Files that are read again: no change is missed, and a reload takes nobody's rights or rates back to the start."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from memlm.errors import Overloaded, Unauthenticated
from memlm.server.frontend.auth import Authenticator
from memlm.server.frontend.watched_files import RECHECK_S, WatchedFiles

ANN = "ann's own secret 0"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now_s = [100.0]
    monkeypatch.setattr("memlm.server.frontend.watched_files.time.monotonic", lambda: now_s[0])
    return now_s


@pytest.fixture
def still_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system whose clock does not tick between two writes."""
    stat = os.stat

    def coarse(path, **options):
        found = stat(path, **options)
        return os.stat_result((*found[:7], 0, 0, 0), {"st_mtime_ns": 0, "st_ctime_ns": 0})

    monkeypatch.setattr("memlm.server.frontend.watched_files.os.stat", coarse)


def in_place(path: Path, text: str) -> None:
    with path.open("r+") as file:
        file.write(text)


def by_rename(path: Path, text: str) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(text)
    beside.replace(path)


@pytest.mark.parametrize("write", [in_place, by_rename, Path.write_text])
def test_a_change_within_one_tick_of_the_clock_is_noticed(
    tmp_path: Path, clock: list[float], still_times: None, write: Callable[[Path, str], object]
) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    files = WatchedFiles(path)
    assert not files.reload()
    write(path, "new")
    assert files.reload()
    assert files.contents == [b"new"]
    write(path, "odd")  # what was read before was half of a write
    clock[0] += 10  # nobody called for a while
    assert files.reload()
    assert files.contents == [b"odd"]


def test_files_that_rest_are_not_read(tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads, read = tmp_path / "f", [0], Path.read_bytes

    def counted(path: Path) -> bytes:
        reads[0] += 1
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", counted)
    path.write_text("old")
    files = WatchedFiles(path)
    clock[0] += RECHECK_S / 2
    assert not files.reload()
    clock[0] += RECHECK_S
    assert not files.reload()
    assert reads == [3]
    for _ in range(5):
        assert not files.reload()
    assert reads == [3]


def test_a_file_that_goes_and_comes_back_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    files = WatchedFiles(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        files.reload()
    assert not files.reload()  # told once
    assert files.contents == [b"old"]
    path.write_text("new")
    assert files.reload()


def tokens(rate: int, name: str = "ann") -> str:
    return f'[[token]]\nname = "{name}"\nsecret = "{ANN}"\nrequests_per_minute = {rate}\n'


def test_a_reload_keeps_the_rates_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memlm.server.frontend.auth.time.monotonic", lambda: 100.0)
    path = tmp_path / "tokens.toml"
    path.write_text(tokens(6))
    guard, metadata = Authenticator(path), (("authorization", f"Bearer {ANN}"),)
    guard.authenticate(metadata).check("Generate")
    for text, is_new in ((tokens(6) + "# reloaded\n", False), (tokens(60), True), (tokens(60, "ben"), True)):
        path.write_text(text)
        if is_new:
            guard.authenticate(metadata).check("Generate")
        else:
            with pytest.raises(Overloaded, match="6 times a minute"):
                guard.authenticate(metadata).check("Generate")


def test_tokens_that_change_in_place_within_a_tick_count_at_once(tmp_path: Path, still_times: None) -> None:
    path, other = tmp_path / "tokens.toml", "ann's own secret 1"
    path.write_text(tokens(600))
    guard = Authenticator(path)
    in_place(path, tokens(600).replace(ANN, other))
    assert guard.authenticate((("authorization", f"Bearer {other}"),)).name == "ann"
    with pytest.raises(Unauthenticated):
        guard.authenticate((("authorization", f"Bearer {ANN}"),))


@pytest.mark.parametrize(("mode", "is_warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_file_of_tokens_that_every_user_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, is_warned: bool
) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text(tokens(6))
    path.chmod(mode)
    Authenticator(path)
    assert ("every user of this machine can read it" in caplog.text) == is_warned
