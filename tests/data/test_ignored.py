"""A folder's corpus is its text: what git, dependencies and environments hold stays out unless it is asked for."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import random_stores
from crashes import calling_at
from random_stores import IVF, add, build

from memlm.data.corpus import Corpus, Problem, UnusableText
from memlm.data.ignored import MAX_IGNORE_BYTES
from memlm.errors import InvalidInput
from memlm.index.store.backup import copy_store


def write(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text of {name}\n")


def found(folder: Path, **options) -> list[str]:
    return [name for name, _ in Corpus([folder], **options).files()]


def test_hidden_files_environments_and_dependencies_stay_out(tmp_path):
    write(
        tmp_path,
        "a.txt",
        ".hidden",
        ".git/config",
        "b/.cache/x",
        "node_modules/p/i.js",
        "b/__pycache__/m.pyc",
        "b/c.md",
    )
    write(tmp_path, "env/pyvenv.cfg", "env/lib/python3/site.py", "not-env/lib/site.py")
    assert found(tmp_path) == ["a.txt", "b/c.md", "not-env/lib/site.py"]
    assert len(found(tmp_path, hidden=True)) == 10


def test_a_path_that_is_named_is_read_whatever_it_is_called(tmp_path):
    write(tmp_path, ".notes", ".folder/text", "node_modules/readme")
    assert found(tmp_path / ".notes") == [".notes"]
    assert found(tmp_path / ".folder") == ["text"]
    assert found(tmp_path / "node_modules") == ["readme"]


def test_the_ignore_file_of_memlm_decides_over_that_of_git(tmp_path):
    write(tmp_path, "a.log", "b.log", "keep.log", "c.txt", "d.txt")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n")
    (tmp_path / ".memlmignore").write_text("!b.log\nd.*\n")
    assert found(tmp_path) == ["b.log", "c.txt", "keep.log"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
@pytest.mark.parametrize("name", [".gitignore", ".memlmignore"])
def test_a_byte_order_mark_is_no_part_of_the_first_pattern(tmp_path, name, encoding):
    """As editors of Windows write it, with its line ends."""
    write(tmp_path, "secret.txt", "other.txt", "a.txt")
    (tmp_path / name).write_bytes("secret.txt\r\nother.txt\r\n".encode(encoding))
    assert found(tmp_path) == ["a.txt"]


def test_a_pattern_ends_at_a_newline_alone(tmp_path):
    write(tmp_path, "a\u2028b", "b", "c\x0cd", "e")
    (tmp_path / ".gitignore").write_bytes("a\u2028b\nc\x0cd".encode())
    assert found(tmp_path) == ["b", "e"]


def test_an_ignore_file_that_cannot_be_read_whole_is_refused(tmp_path):
    """What it leaves out may be secret."""
    write(tmp_path, "a.txt", "b/c.txt")
    (tmp_path / "b" / ".gitignore").write_bytes(b"#" * MAX_IGNORE_BYTES + b"\nc.txt\n")
    with pytest.raises(InvalidInput, match=r"b/\.gitignore cannot be read .*what it leaves out is not known"):
        found(tmp_path)
    assert "b/c.txt" in found(tmp_path, hidden=True)


def test_an_ignore_file_that_is_a_link_is_not_read(tmp_path):
    write(tmp_path, "corpus/a.txt")
    (tmp_path / "secret").write_text("a.txt\n")
    (tmp_path / "corpus" / ".gitignore").symlink_to(tmp_path / "secret")
    assert found(tmp_path / "corpus") == ["a.txt"]


def test_binary_files_are_named_with_one_reason(tmp_path):
    write(tmp_path, "a.txt", "z.txt")
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(b"PNG\0\0")
    problems = list[Problem]()
    documents = list(Corpus([tmp_path], on_problem=problems.append))
    assert [document.id for document in documents] == ["a.txt", "z.txt"]
    assert [problem.where for problem in problems] == [f"{number}.png:1" for number in range(5)]
    assert {problem.reason for problem in problems} == {"a NUL byte, as in binary files"}
    with pytest.raises(UnusableText, match=r"0\.png:1: a NUL byte"):
        list(Corpus([tmp_path], on_error="fail"))


def test_a_datastore_is_no_text(tmp_path, store_folder):
    store = tmp_path / "docs" / "store"
    shutil.copytree(store_folder, store)
    write(tmp_path, "docs/a.md")
    for hidden in (False, True):
        assert found(tmp_path / "docs", hidden=hidden) == ["a.md"]
        assert found(store, hidden=hidden) == []
    (store / "CURRENT").unlink()
    (store / "commit.lock").unlink()
    assert found(tmp_path / "docs") == ["a.md"]


def test_no_step_of_a_build_an_addition_or_a_copy_is_text(tmp_path):
    write(tmp_path, "note.md")
    store, listings = tmp_path / "store", list[list[str]]()
    with calling_at(1, lambda: listings.append(found(tmp_path, hidden=True))):
        build(store, random_stores.Corpus(1), IVF).close()
        add(store, random_stores.Corpus(2, prefix="more"))
        copy_store(store, tmp_path / "snapshot")
    assert len(listings) > 30
    assert all(listing == ["note.md"] for listing in listings)


def test_a_folder_with_the_names_of_a_datastore_is_text(tmp_path):
    names = ["city/building.json", "city/segments/a.txt", "plan/CURRENT", "plan/segment/a.txt", "tmp/segments/b.txt"]
    write(tmp_path, *names)
    assert found(tmp_path) == names


def test_a_datastore_that_is_named_is_reported_and_refused_alone(tmp_path, store_folder):
    write(tmp_path, "a.md")
    with pytest.raises(InvalidInput, match="a datastore, and no text; name the files or folders"):
        list(Corpus([store_folder]))
    problems: list[str] = []
    documents = Corpus([tmp_path / "a.md", store_folder], on_problem=lambda problem: problems.append(str(problem)))
    assert [document.id for document in documents] == ["a.md"]
    assert problems == [f"{store_folder}: a datastore, and no text; left out"]


RULES = [
    "*.md",
    "/a",
    "b/",
    "!keep*",
    "c/**",
    "a/*/d",
    "**/e",
    "!b/keep.txt",
    "d/e/",
    "# note",
    "",
    r"\!x",
    "keep.md",
    "*",
]
NAMES = ["a", "b", "c", "d", "e", "keep.txt", "keep.md", "x.md", "!x"]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("seed", range(30))
def test_random_rules_leave_out_what_git_leaves_out(tmp_path, seed):
    generator = random.Random(seed)
    for _ in range(40):
        path = tmp_path.joinpath(*generator.choices(NAMES[:5], k=generator.randrange(4)), generator.choice(NAMES[5:]))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("text")
    folders = [tmp_path, *(path for path in tmp_path.rglob("*") if path.is_dir())]
    for folder in generator.sample(folders, min(4, len(folders))):
        (folder / ".gitignore").write_text("\n".join(generator.sample(RULES[:-1], 4)))
    subprocess.run(["git", "init", "--quiet", "--template=", tmp_path], check=True)
    listed = ["git", "-C", tmp_path, "-c", "core.excludesFile=", "ls-files", "--others", "--exclude-standard", "-z"]
    expected = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.split("\0")
    assert found(tmp_path) == sorted((name for name in expected if name and ".gitignore" not in name), key=Path)
