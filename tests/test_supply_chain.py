"""Files of models and stores are data: no call in the package runs code that a file, a download or a caller brings."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlm.model.files.catalog import WANTED

ROOT = Path(__file__).parents[1]
FILES = sorted(file for folder in ("memlm", "index", "server") for file in (ROOT / folder).rglob("*.py"))
UNPICKLING = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "copyreg"}
# `trainer` names one exception of pickle; what torch.load reads there is restricted to weights.
MAY_NAME_PICKLE = {"memlm/training/trainer.py"}
# Pipes between a server's own processes: what they carry was made by one of them.
MAY_RECEIVE = {
    "server/jobs/process.py",
    "server/inference/handle.py",
    "server/inference/pipe.py",
    "server/jobs/worker.py",
}
MAY_START_PROCESSES = {
    "memlm/bench/report.py",
    "server/local.py",
    "memlm/bench/build.py",
    "memlm/bench/serve.py",
    "memlm/bench/versus_llama_cpp.py",
    "memlm/cli/models.py",
    "memlm/data/extract/pool.py",
    "memlm/distributed/shard_finder.py",
}
FORBIDDEN = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp", "os.spawnv", "yaml.load",
    "yaml.full_load", "yaml.unsafe_load", "torch.hub.load", "torch.package.PackageImporter", "torch.jit.load",
    "torch.ops.load_library", "sqlite3.enable_load_extension", "importlib.util.spec_from_file_location",
    "runpy.run_path", "runpy.run_module",
}  # fmt: skip


def calls() -> Iterator[tuple[str, str, ast.Call]]:
    """Every call in the package: the file, what is called as it is written, and the call."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield file.relative_to(ROOT).as_posix(), ast.unparse(node.func), node


def option(call: ast.Call, name: str) -> object:
    """A keyword's literal value; None where it is not given, a note where it is no literal."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else ast.unparse(keyword.value)
    return None


def test_the_calls_are_seen() -> None:
    """So that the tests below do not pass for want of anything to look at."""
    seen = {name for _, name, _ in calls()}
    assert {"torch.load", "np.load", "subprocess.Popen"} <= seen
    assert len(FILES) > 80


def test_no_file_is_unpickled() -> None:
    for file, name, call in calls():
        if name == "torch.load":
            assert option(call, "weights_only") is True, f"{file}:{call.lineno}"
        if name in ("np.load", "numpy.load", "np.lib.format.read_array"):
            assert option(call, "allow_pickle") in (None, False), f"{file}:{call.lineno}"
            assert all(keyword.arg for keyword in call.keywords), f"{file}:{call.lineno}: options by **"
        if name.endswith(".recv"):
            assert file in MAY_RECEIVE, f"{file}:{call.lineno} unpickles what comes over a pipe"
        assert name.split(".")[0] not in UNPICKLING, f"{file}:{call.lineno} {name}"


def test_pickle_is_imported_nowhere_else() -> None:
    for file in FILES:
        where = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = {name.split(".")[0] for name in names} & UNPICKLING
            assert not found or where in MAY_NAME_PICKLE, f"{where}:{node.lineno} imports {found}"  # type: ignore[attr-defined]


def test_nothing_is_evaluated_and_no_shell_is_started() -> None:
    for file, name, call in calls():
        assert name not in FORBIDDEN, f"{file}:{call.lineno} {name}"
        assert option(call, "shell") in (None, False), f"{file}:{call.lineno} {name} with a shell"
        assert option(call, "trust_remote_code") in (None, False), f"{file}:{call.lineno} {name}"
        if name.startswith("subprocess."):
            assert file in MAY_START_PROCESSES, f"{file}:{call.lineno} starts a process"


def test_values_reach_sqlite_as_parameters() -> None:
    """A statement is a literal, or a name of one; never a text that is put together at the call."""
    for file, name, call in calls():
        if name.endswith((".execute", ".executemany", ".executescript")) and call.args:
            assert isinstance(call.args[0], ast.Constant | ast.Name), f"{file}:{call.lineno} {ast.unparse(call)}"


def test_a_statement_that_is_put_together_holds_placeholders_alone() -> None:
    made = [
        node
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.JoinedStr)
        and any(isinstance(part, ast.Constant) and "select " in str(part.value).lower() for part in node.values)
    ]
    for statement in made:
        for part in statement.values:
            if isinstance(part, ast.FormattedValue):
                assert ast.unparse(part.value).startswith("', '.join('?' *"), ast.unparse(statement)


@pytest.mark.parametrize("pattern", WANTED)
def test_no_code_and_no_pickle_is_downloaded(pattern: str) -> None:
    assert not pattern.endswith((".py", ".bin", ".pt", ".pth", ".pkl", ".ckpt", "*", ".so"))
