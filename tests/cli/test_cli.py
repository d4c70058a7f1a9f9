"""The command line: exit codes, one clear line for what is wrong, JSON for programs."""

import contextlib
import io
import json
import os
import pty
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from importlib.metadata import distributions, version
from pathlib import Path
from shlex import quote
from types import SimpleNamespace

import pytest
import torch
import trustme
import typer
from chats import save_chat_model
from running import PATIENCE_S
from texts import make_text
from typer.testing import CliRunner

from memlm.bench.machine import machine
from memlm.cli import main
from memlm.cli.app import app
from memlm.cli.serve import announcement
from memlm.cli.store.render import SERVED_WITHOUT_KEYS
from memlm.cli.terminal.connection import in_their_places
from memlm.cli.terminal.console import ConsoleProgress, jsonable
from memlm.cli.terminal.options import num_bytes
from memlm.index.store.lock import write_lock
from memlm.index.store.manifest import read_manifest
from memlm.indexing.estimate import SAMPLE_DOCUMENTS
from memlm.retrieval.own_past import SETTINGS_FILE
from memlm.server.config import ServerConfig
from memlm.server.registry import DatastoreRegistry


def memlm(capsys: pytest.CaptureFixture, *words: object) -> tuple[int, str, str]:
    """Runs a command in this process; exit code, standard output, standard error."""
    before = sys.argv
    sys.argv = ["memlm", *map(str, words)]
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        sys.argv = before
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture
def own_store(store_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store_folder, tmp_path / "store"))


def test_every_command_has_help_with_an_example(capsys):
    groups = {"": "train eval lm-eval tune generate chat answer score trace inspect demo serve info doctor",
              "index": "build add sync remember delete compact verify snapshot info load unload search passages",
              "session": "create append info forget fork delete",
              "operation": "info wait cancel delete",
              "bench": "build generate serve load model versus"}  # fmt: skip
    for group, commands in groups.items():
        for command in commands.split():
            code, out, _ = memlm(capsys, *group.split(), command, "--help")
            assert code == 0
            assert f"Example: memlm {group}".strip() in " ".join(out.split()), command


def test_wrong_use_exits_with_2(capsys):
    for words in (
        ["index", "build"], ["index", "delete", "s"], ["index", "delete", "s", "id", "--where", "a=b"],
        ["index", "delete", "s", "--where", "license"], ["train", "x", "--out", "m", "--steps", "many"],
        ["tune", "x", "--model", "m", "--spalm"], ["tune", "x", "--model", "m", "--keep-gain", "0.9"],
        ["tune", "x", "--model", "m", "--store", "s", "--spalm", "--keep-gain", "0.9"],
        ["tune", "x", "--model", "m", "--answers"], ["tune", "x", "y", "-m", "m", "-s", "s", "--answers"],
        ["tune", "x", "-m", "m", "-s", "s", "--answers", "--spalm"],
        ["mystery"], ["--mystery"], ["generate", "x", "--model", "m", "--drafts", "on"],
    ):  # fmt: skip
        assert memlm(capsys, *words)[0] == 2


def test_options_of_another_place_are_refused_before_anything_is_called(capsys):
    """Those of a model in this process beside a server, and those of a server without one."""
    for words, says in (
        ("generate x", "give --model"),
        ("generate x --model m --target a:1", "does not take --model"),
        ("answer x --store s --target a:1", "--store-name"),
        ("score x --dtype int8 --target a:1", "does not take --dtype"),
        ("index build x --out s --dry-run --target a:1", "does not take --dry-run"),
        ("index delete s --where a=b --target a:1", "does not take --where"),
        ("generate x --model m --session s", "--session is for a server"),
        ("index compact s --no-wait", "is for a server"),
        ("index sync s x --model m --as y", "--as is for a server"),
        ("index info s --timeout 3", "--timeout is for a server; give --target"),
        ("score x --model m --token t", "--token is for a server; give --target"),
        ("eval x --model m --timeout 3", "--timeout is for a server, and `eval` works on none"),
        ("--token=t --tls doctor", "--token, --tls is for a server, and `doctor` works on none"),
        ("info --timeout 0", "'--timeout': it is 0; give more than 0 seconds"),
        ("score x --target=", "'--target': it is empty; give HOST:PORT"),
        ("session info --target=", "'--target': it is empty; give HOST:PORT"),
        ("index remember s x --model m --metadata y", "--metadata is 'y'; expected FIELD=VALUE"),
    ):
        code, out, error = memlm(capsys, *words.split())
        shown = " ".join(error.replace("│", " ").split())
        assert (code, out) == (2, ""), words
        assert says in shown, shown


@pytest.fixture
def places(model_folder: Path, store_folder: Path, corpus_folder: Path, tmp_path: Path) -> dict[str, Path]:
    """The files and folders that FAILURES name."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "f.toml").write_text("dimension = 3")
    paths = {name: tmp_path / name for name in ("empty", "nowhere", "new")}
    there = {"model": model_folder, "store": store_folder, "corpus": corpus_folder}
    return {**paths, **there, "settings": tmp_path / "f.toml"}


BUILD = "index build {corpus} --model {model} --out {new}"
FAILURES = {
    "train on nothing": ("train {nowhere} --out {new}", "no file or folder"),
    "train on an empty folder": ("train {empty} --out {new}", "no text was found"),
    "train into a folder": ("train {corpus} --out {model}", "another folder"),
    "train an unknown preset": ("train {corpus} --out {new} --preset huge", "tiny, small, base"),
    "train with an unknown setting": ("train {corpus} --out {new} --config {settings}", "dimension"),
    "train with an unknown choice": ("train {corpus} --out {new} --on-error ignore", "'skip' or 'fail'"),
    "train where nobody may write": ("train {corpus} --out /proc/x", "/proc/x cannot be used"),
    "build with no model": ("index build {corpus} --model {nowhere} --out {new}", "no such folder"),
    "build over a datastore": ("index build {corpus} --model {model} --out {store}", "index add"),
    "build an unknown index": (f"{BUILD} --index X", "IVF"),
    "build a share above 1": (f"{BUILD} --share 2", "--share is 2"),
    "build of a datastore": ("index build {store} --model {model} --out {new}", "a datastore, and no text"),
    "info of nothing": ("index info {nowhere}", "memlm index build"),
    "snapshot into a folder": ("index snapshot {store} {corpus}", "new folder"),
    "delete an unknown document": ("index delete {store} nobody", "nobody"),
    "search for nothing": ("index search {store} '' --model {model} --k 0", "--k is 0"),
    "passages for nothing": ("index passages {store} ' ' --model {model}", "QUESTION is empty"),
    "eval of an empty folder": ("eval {empty} --model {model}", "no text was found"),
    "generate above a range": ("generate x --model {model} --top-p 2", "--top-p is 2.0"),
    "too many drafts": ("generate x --model {model} --drafts 65", "--drafts is 65; expected between 0 and 64"),
    "a draft with an early exit": (
        "generate x --model {model} --draft y --early-exit",
        "--draft is given with early_exit",
    ),
    "generate from a long prompt": ("generate {long} --model {model}", "shorten the prompt"),
    "a weight of no datastore": ("generate x --model {model} --lam 0.3", "--lam is set, but no datastore"),
    "a temperature of no datastore": (
        "generate x --model {model} --knn-temperature 3 --no-store",
        "--knn-temperature is set",
    ),
    "generate from no file": ("generate --file {nowhere} --model {model}", "cannot be read (No such file"),
    "generate from a folder": ("generate --file {empty} --model {model}", "cannot be read (Is a directory"),
    "append words as a file": ("session append NAME 'Some words'", "Some words cannot be read"),
    "append a folder": ("session append NAME {empty}", "cannot be read (Is a directory"),
    "serve no model": ("serve --model {nowhere} --port 0", "no such folder"),
    "serve at no port": ("serve --model {model} --port 70000", "--port is 70000"),
    "call no server": ("score x --target localhost:1 --timeout 2", "memlm serve"),
}


@pytest.mark.parametrize(("command", "says"), FAILURES.values(), ids=FAILURES)
def test_failure_exits_with_1_and_one_line(capsys, places, command, says):
    words = [word.format(**places, long="word " * 200) for word in shlex.split(command)]
    code, out, err = memlm(capsys, *words)
    assert (code, out) == (1, "")
    assert err.startswith("memlm: ")
    assert err.count("\n") == 1, err
    assert says in err


def test_what_needs_no_model_is_checked_before_one_is_loaded(
    capsys, monkeypatch, model_folder, store_folder, corpus_folder, tmp_path
):
    empty, nowhere = tmp_path / "empty", tmp_path / "nowhere"
    empty.mkdir()
    (tmp_path / "broken.jsonl").write_text('{"text": 5}\n')
    monkeypatch.setattr(
        "memlm.model.files.checkpoint.read_config_file", lambda folder: pytest.fail("a model was loaded")
    )
    for words, says in (
        (["index", "build", corpus_folder, "--out", store_folder], "index add"),
        (["index", "build", empty, "--out", tmp_path / "s"], "no text was found"),
        (["index", "build", empty, "--out", tmp_path / "s", "--dry-run"], "no text was found"),
        (["index", "add", store_folder, empty], "no text was found"),
        (["index", "add", store_folder, corpus_folder, "--check", "foo"], "expected one of quick"),
        (["index", "build", corpus_folder, "--out", tmp_path / "s", "--check", "foo"], "expected one of quick"),
        (["index", "build", corpus_folder, "--out", tmp_path / "s", "--share", "3"], "--share is 3.0"),
        (["index", "build", corpus_folder, "--out", corpus_folder], "no unfinished datastore"),
        (["index", "add", nowhere, corpus_folder], "memlm index build"),
        (["tune", empty, "--store", store_folder], "no text was found"),
        (["tune", corpus_folder, "--store", nowhere], "memlm index build"),
        (["tune", corpus_folder, "--store", nowhere, "--spalm"], "memlm index build"),
        (["tune", tmp_path / "questions.jsonl", "--store", store_folder, "--answers"], "questions.jsonl"),
        (["tune", tmp_path / "broken.jsonl", "--store", store_folder, "--answers"], "line 1: expected"),
        (["index", "search", nowhere, "x"], "memlm index build"),
        (["tune", empty], "no text was found"),
        (["calibrate", empty], "no text was found"),
        (["eval", empty], "no text was found"),
        (["eval", tmp_path / "broken.jsonl"], "no text was found"),
        (["eval", corpus_folder, "--store", nowhere], "memlm index build"),
        (["generate", "x", "--store", nowhere], "memlm index build"),
    ):
        code, _, err = memlm(capsys, *words, "--model", model_folder)
        assert code == 1, words
        assert says in err, words
    code, _, err = memlm(
        capsys, "index", "build", corpus_folder, "--out", tmp_path / "s", "--max-ram", "x", "--model", model_folder
    )
    assert (code, "number of bytes" in err) == (2, True)
    code, _, err = memlm(capsys, "inspect", model_folder, "--out", nowhere / "report.html")
    assert (code, "give a file in a folder that is there" in err) == (1, True)


def test_a_port_in_use_is_told_before_anything_is_loaded(capsys, model_folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = memlm(capsys, "serve", "--model", model_folder, "--port", taken.getsockname()[1])
    assert code == 1
    assert "choose another port" in err


def test_info_says_what_a_person_asks_for(capsys, model_folder, store_folder):
    _, shown, _ = memlm(capsys, "index", "info", store_folder)
    for words in (
        "entries of 8 documents",
        "kB in 1 segment",
        f"{model_folder.name}, keys of",
        "manifest",
        "exact distances",
        "not yet: run",
    ):
        assert words in shown


def test_a_server_says_what_it_serves(model_folder, store_folder):
    config = ServerConfig(model=model_folder, stores=(store_folder,), http_port=8080)
    first, *lines = announcement(config, "127.0.0.1:1234", "http://127.0.0.1:8080")
    assert first == f"serving {model_folder} at 127.0.0.1:1234"
    for words in (
        str(store_folder),
        "32 requests",
        "4GiB",
        "no tokens",
        "--log-level info",
        "http://127.0.0.1:8080/metrics",
        "--target localhost:1234",
    ):
        assert any(words in line for line in lines), words


def test_a_server_tells_the_datastores_of_its_folder_too(model_folder, store_folder, tmp_path):
    registry = DatastoreRegistry((), tmp_path)
    registry.put("notes", tmp_path / "notes-1")
    config = ServerConfig(model=model_folder, stores=(store_folder,), store_dir=tmp_path)
    (line,) = [each for each in announcement(config, "127.0.0.1:1234") if "datastores" in each]
    assert line.split(maxsplit=1)[1] == f"{store_folder.name} ({store_folder}), notes ({tmp_path / 'notes-1'})"


def test_an_interrupted_wait_names_the_command_that_cancels_there(capsys, monkeypatch, tmp_path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("memlm.cli.served.operations.follow", interrupted)
    (authority := tmp_path / "ca file.pem").write_bytes(trustme.CA().cert_pem.bytes())
    for words, said in (
        (["--target", "a:1"], "--target a:1`"),
        (
            ["--target", "a:1", "--ca", authority, "--token", "secret"],
            f"--target a:1 --ca '{authority}' --token TOKEN`",
        ),
        ([], "`memlm operation cancel operations/7` stops it"),
    ):
        code, _, err = memlm(capsys, "operation", "wait", "operations/7", *words)
        assert code == 130
        assert said in " ".join(err.split()), err
        assert "secret" not in err


def test_the_command_that_a_server_offers_has_what_it_wants(model_folder, tmp_path):
    paths = {name: tmp_path / name for name in ("tls_cert", "tls_key", "tls_client_ca", "auth_file")}
    config = ServerConfig(model=model_folder, **paths)
    words = shlex.split(announcement(config, "127.0.0.1:50051")[-1])
    assert words[3:] == ["Once upon a time", "--ca", "CA.pem", "--cert", "CLIENT.pem", "--key", "CLIENT.key",
                         "--token", "TOKEN"]  # fmt: skip


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--target a:1 index info s", "index info s --target a:1"),
        ("index --target=a:1 info s --json", "index info s --json --target=a:1"),
        ("generate x --ca f --token s --tls", "--ca f --token s --tls generate x"),
        ("--timeout 3 --ca=f generate x -n 2 -- --target b", "--timeout 3 --ca=f generate x -n 2 -- --target b"),
        ("generate --token", "generate --token"),
        ("--ca f generate x --target a:1", "--ca f generate x --target a:1"),
        ("", ""),
    ],
)
def test_the_options_of_a_connection_stand_before_a_command_or_after_it(given, meant):
    assert in_their_places(given.split()) == meant.split()


def test_a_command_takes_its_connection_in_any_place(capsys):
    for words in (
        ("--target", "http://localhost:1/x", "index", "info", "s"),
        ("index", "--target", "http://localhost:1/x", "info", "s", "--token", "t"),
        ("info", "--tls", "--target", "http://localhost:1/x"),
    ):
        code, _, error = memlm(capsys, *words)
        assert (code, "expected HOST:PORT" in error) == (1, True), error


def test_json_is_one_object_on_standard_output(capsys, model_folder, own_store, corpus_folder, tmp_path):
    text = corpus_folder / "doc-7.txt"
    for words, has in (
        (["index", "info", own_store], "entries"),
        (["index", "verify", own_store], "ok"),
        (["index", "snapshot", own_store, tmp_path / "backup"], "num_linked"),
        (["index", "search", own_store, "the memory", "--model", model_folder], "neighbors"),
        (["index", "passages", own_store, "the memory", "--model", model_folder], "passages"),
        (["tune", text, "--store", own_store, "--model", model_folder], "lam"),
        (["eval", text, "--model", model_folder, "--store", own_store], "knn"),
        (["generate", "the", "--model", model_folder, "--store", own_store, "--seed", "1"], "finished"),
        (["index", "delete", own_store, "doc-0.txt"], "documents"),
    ):
        code, out, _ = memlm(capsys, *words, "--json")
        assert code == 0, words
        assert has in json.loads(out), words


def test_eval_tells_the_figures_that_the_design_names(capsys, model_folder, store_folder, corpus_folder):
    words = ["eval", corpus_folder / "doc-7.txt", "--model", model_folder, "--store", store_folder, "--json"]
    answer = json.loads(memlm(capsys, *words)[1])
    figures = {"nll", "token_perplexity", "word_perplexity", "bits_per_byte"}
    assert {"tokens", "words", "bytes"} | figures <= set(answer)
    assert set(answer["base"]) == figures
    assert set(answer["knn"]) == figures | {"k", "lam", "temperature"}
    assert answer["texts"]["doc-7.txt"]["nll"] == pytest.approx(answer["nll"])


def test_verify_exits_with_1_where_something_is_wrong(capsys, own_store, monkeypatch):
    monkeypatch.setattr("memlm.index.store.segment.SMALL_BYTES", 0)
    path = own_store / "segments" / "000002" / "keys.npy"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, out, err = memlm(capsys, "index", "verify", own_store)
    assert code == 1
    assert "1 problem\n" in out
    assert "keys.npy" in err


def test_an_emptied_store_passes_verify_and_is_not_tuned(capsys, model_folder, own_store, corpus_folder):
    every = [f"doc-{number}.txt" for number in range(8)]
    assert memlm(capsys, "index", "delete", own_store, *every)[0] == 0
    before = read_manifest(own_store)
    code, out, err = memlm(capsys, "index", "verify", own_store, "--model", model_folder)
    assert (code, err) == (0, ""), out
    code, _, err = memlm(capsys, "tune", corpus_folder, "--store", own_store, "--model", model_folder)
    assert code == 1
    assert "nothing to tune" in err
    assert read_manifest(own_store) == before


def test_the_past_of_a_text_and_a_gate_are_tuned_as_a_datastore_is(capsys, model_folder, own_store, tmp_path):
    model, texts = Path(shutil.copytree(model_folder, tmp_path / "model")), tmp_path / "texts"
    texts.mkdir()
    for number in range(6):
        (texts / f"{number}.txt").write_text(f"{make_text(100 + number, 12)} " * 8)
    words = ["tune", texts, "--model", model, "--max-tokens", 4000]
    past = json.loads(memlm(capsys, *words, "--json")[1])
    assert (past["documents"], past["kept"], (model / SETTINGS_FILE).exists()) == (6, True, True)
    gate = json.loads(memlm(capsys, *words, "--store", own_store, "--spalm", "--json")[1])
    assert gate["k"] == 16
    assert "Saved with" in memlm(capsys, *words)[1]
    assert "nats per token alone" in memlm(capsys, *words, "--store", own_store, "--spalm")[1]


def test_tuning_says_why_keep_gain_has_no_effect(capsys, model_folder, own_store, corpus_folder, tmp_path):
    (tmp_path / "note.txt").write_text("a memory of a model", encoding="utf-8")  # too short to sample passages of
    (tmp_path / "noise.txt").write_text(" ".join(f"{number * 7919 % 9973}" for number in range(60)), encoding="utf-8")
    words = ["--model", model_folder]
    note = tmp_path / "note"
    assert memlm(capsys, "index", "build", tmp_path / "note.txt", *words, "--out", note, "--check", "none")[0] == 0
    tuned = ["tune", tmp_path / "noise.txt", "--store", note, *words, "--json"]
    code, out, err = memlm(capsys, *tuned, "--keep-gain", "0.9")
    report = json.loads(out)
    assert (code, report["adaptive_kept"], report["threshold"]) == (0, False, 0)
    line = err.strip().splitlines()[-1]
    assert line.startswith("--keep-gain 0.9 has no effect: a threshold is of a lam that adapts, and none is kept.")
    for figure in ("adaptive_nats", "base_nats", "knn_nats"):
        assert f" {report[figure]:.4f}" in line
    assert "keep-gain" not in memlm(capsys, *tuned)[2]
    kept = ["tune", corpus_folder / "doc-7.txt", "--store", own_store, *words, "--keep-gain", "0.9"]
    code, out, err = memlm(capsys, *kept)
    assert (code, "keep-gain" in err) == (0, False)
    assert "lam is 0 below" in out


def test_a_store_without_current_is_repaired_as_its_error_says(capsys, own_store, model_folder, corpus_folder):
    (own_store / "CURRENT").unlink()
    for command in (["info", own_store], ["build", corpus_folder, "--model", model_folder, "--out", own_store]):
        code, _, err = memlm(capsys, "index", *command)
        assert code == 1
        assert f"memlm index verify {quote(str(own_store))} --repair" in " ".join(err.split())
    code, out, _ = memlm(capsys, "index", "verify", own_store, "--repair")
    assert code == 0
    assert "CURRENT was restored" in out
    assert memlm(capsys, "index", "info", own_store)[0] == 0


def test_a_build_whose_checks_were_cut_short_says_how_to_finish_them(
    capsys, model_folder, corpus_folder, tmp_path, monkeypatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    build = ["index", "build", corpus_folder, "--model", model_folder, "--out", tmp_path / "s"]
    with monkeypatch.context() as patched:
        patched.setattr("memlm.indexing.keys.run_checks", interrupted)
        code, _, problem = memlm(capsys, *build, "--index", "IVF16,SQfp16")
    assert code == 130
    by_hand = f"memlm index verify {quote(str(tmp_path / 's'))} --model"
    assert f"is committed; what was left of its checks is done by: {by_hand}" in problem
    verify = ["index", "verify", tmp_path / "s", "--model", model_folder]
    assert by_hand in memlm(capsys, *build)[2]
    for finished in (True, False):
        code, printed, problem = memlm(capsys, *verify, "--json")
        assert code == 0, problem
        assert json.loads(printed) == {"ok": True, "problems": [], "finished": finished}
    assert "not measured" not in memlm(capsys, *build)[2]
    facts = json.loads(memlm(capsys, "index", "info", tmp_path / "s", "--json")[1])
    assert facts["quality"]["recall"] > 0.5


def test_a_build_without_checks_says_so(capsys, model_folder, corpus_folder, tmp_path):
    store = tmp_path / "my store"
    build = ["index", "build", corpus_folder, "--model", model_folder, "--out", store, "--check", "none"]
    code, printed, problem = memlm(capsys, *build)
    assert code == 0, problem
    assert re.search(r"^[\d,]+ tokens from \d+ documents, [\d,]+ bytes a token; ", printed)
    assert f"nothing was checked or tuned (--check none); memlm index verify '{store}' --model" in printed
    assert "positions read again" not in printed
    assert memlm(capsys, "index", "verify", store, "--model", model_folder)[0] == 0
    facts = json.loads(memlm(capsys, "index", "info", store, "--json")[1])
    assert facts["quality"]["recall"] == 1
    assert facts["tuned_on"].startswith("its own documents")
    code, _, problem = memlm(capsys, *build[:-1], "some")
    assert (code, "check is 'some'" in problem) == (1, True)


def test_a_dry_run_lists_the_files_that_would_be_read(capsys, model_folder, corpus_folder, tmp_path):
    build = ["index", "build", corpus_folder, "--model", model_folder, "--out", tmp_path / "s", "--dry-run"]
    names = sorted(file.name for file in corpus_folder.iterdir())
    printed = memlm(capsys, *build)[1]
    assert printed.splitlines()[: len(names)] == names
    result = json.loads(memlm(capsys, *build, "--json")[1])
    assert (result["files"], result["tokens_per_s"] > 0) == (names, True)
    assert not (tmp_path / "s").exists()


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A folder of 20 GB that takes no room. The estimate reads its first documents."""
    (tmp_path / "huge").mkdir()
    for number in range(SAMPLE_DOCUMENTS):
        (tmp_path / "huge" / f"a{number}.txt").write_text(f"document {number}: {make_text(number, 20)}")
    with (tmp_path / "huge" / "z.txt").open("wb") as last:
        last.truncate(20 * 10**9)
    return tmp_path / "huge"


def at_terminal(typed: str, *words: object) -> tuple[int, str]:
    """Runs a command in a pseudo-terminal where some keys were typed ahead; its exit code, and what it printed."""
    main_side, side = pty.openpty()
    command = [sys.executable, "-m", "memlm", *map(str, words)]
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side) as process:
        os.close(side)
        os.write(main_side, typed.encode())
        shown = b""
        with contextlib.suppress(OSError):  # the command has closed its side
            while data := os.read(main_side, 1 << 16):
                shown += data
        code = process.wait(PATIENCE_S)
    os.close(main_side)
    return code, " ".join(shown.decode().split())


def test_long_work_is_foretold_and_asked_about_on_a_terminal(capsys, model_folder, own_store, huge, tmp_path):
    foretold = r"The keys of [\d,]+ tokens take about [\d.,]+ (h|days)\."
    build = ["index", "build", huge, "--model", model_folder, "--out", tmp_path / "s"]
    code, shown = at_terminal("n\n", *build, "--keys", "now")
    assert code == 1
    assert re.search(rf"{foretold}.*Go on\? \[y/N\]", shown, re.DOTALL)
    assert not (tmp_path / "s").exists()
    printed = memlm(capsys, *build, "--dry-run")[1]
    assert re.search(
        r"time +about [\d.,]+ (min|h|days) until it answers, [\d.,]+ (h|days) for keys, [\d,]+ tokens/s", printed
    )

    add = ["index", "add", own_store, huge, "--model", model_folder, "--check", "none", "--keys", "now"]
    code, shown = at_terminal("", *add, "--yes")
    assert (code, "Go on?" in shown) == (0, False)
    assert re.search(foretold, shown)
    code, _, told = memlm(capsys, *add, "--replace")
    assert (code, "Go on?" in told) == (0, False)
    assert re.search(foretold, told)
    assert "take about" not in memlm(capsys, "index", "add", own_store, huge / "a0.txt", "--model", model_folder)[2]


def test_another_model_adds_nothing(capsys, tokenizer, own_store, corpus_folder, tmp_path):
    other = save_chat_model(tmp_path / "other", tokenizer, context_length=16)  # its windows are too short for the store
    code, _, told = memlm(capsys, "index", "add", own_store, corpus_folder, "--model", other)
    assert (code, "was built with another tokenizer" in told) == (1, True)


def test_an_addition_without_keys_says_that_others_have_some(capsys, model_folder, own_store, tmp_path):
    (tmp_path / "more.txt").write_text("the memory of a model")
    added = ("index", "add", own_store, tmp_path / "more.txt", "--model", model_folder, "--keys", "none")
    assert "no keys: neighbors come from the other documents" in memlm(capsys, *added)[1]


def test_a_store_without_keys_names_what_it_serves(capsys, tokenizer, corpus_folder, tmp_path):
    store, model = tmp_path / "s", save_chat_model(tmp_path / "chat", tokenizer, context_length=4000)
    code, printed, told = memlm(
        capsys, "index", "build", corpus_folder, "--model", model, "--out", store, "--keys", "none"
    )
    assert (code, "take about" in told) == (0, False)
    assert f"no keys: {SERVED_WITHOUT_KEYS}" in printed
    assert f"none: {SERVED_WITHOUT_KEYS}" in memlm(capsys, "index", "info", store)[1]
    text = (corpus_folder / "doc-3.txt").read_text()[:60]
    opened = ("--model", model, "--store", store)
    for words in (
        ("answer", text, *opened, "--max-tokens", "4"),
        ("index", "passages", store, text, "--model", model),
        ("index", "search", store, text, "--by", "words", "--model", model),
        ("trace", text, *opened),
    ):
        code, printed, told = memlm(capsys, *words)
        assert (code, "doc-3.txt" in printed) == (0, True), (words, printed, told)


def test_text_that_cannot_be_used_is_told_and_left_out(capsys, model_folder, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the memory of a model")
    (tmp_path / "texts" / "bad.txt").write_bytes(b"fine\n\xff")
    words = ["index", "build", tmp_path / "texts", "--model", model_folder, "--out", tmp_path / "s"]
    code, _, err = memlm(capsys, *words, "--on-error", "fail")
    assert code == 1
    assert "bad.txt:2" in err
    assert not (tmp_path / "s").exists()
    code, out, err = memlm(capsys, *words)
    assert code == 0
    assert "skipped bad.txt:2" in err
    assert "from 1 document," in out


def test_a_report_names_every_file_and_the_terminal_the_first_of_each_reason(capsys, model_folder, tmp_path):
    folder, report = tmp_path / "texts", tmp_path / "report.jsonl"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.png").write_bytes(b"PNG\0\0")
    (folder / "a.html").write_text("<title>A</title><p>some text")
    (folder / "b.jsonl").write_text('{"id": "x", "text": "four"}\n{}\n')
    options = ("--model", model_folder, "--report", report)
    code, _, told = memlm(capsys, "index", "build", folder, "--out", tmp_path / "s", *options)
    assert code == 0
    assert [line.split(":")[0] for line in told.splitlines() if line.startswith("skipped")] == [
        "skipped 0.png", "skipped 1.png", "skipped 2.png", "skipped b.jsonl", "skipped 2 more",
    ]  # fmt: skip
    assert "skipped 2 more: a NUL byte, as in binary files (3.png:1, 4.png:1)" in told
    *left_out, html, line = map(json.loads, report.read_text().splitlines())
    assert [each["path"] for each in left_out] == [*(f"{number}.png:1" for number in range(5)), "b.jsonl:2"]
    assert left_out[-1]["reason"] == 'not a JSON document ("text" is missing, empty or no string)'
    assert html == {"path": "a.html", "id": "a.html", "format": "html", "characters": 10}
    assert line == {"path": "b.jsonl", "id": "x", "format": "text", "characters": 4}
    (folder / "c.txt").write_text("another text")
    memlm(capsys, "index", "add", tmp_path / "s", folder / "c.txt", *options)
    assert json.loads(report.read_text())["id"] == "c.txt"
    code, _, told = memlm(
        capsys, "index", "add", tmp_path / "s", folder / "c.txt", "--model", model_folder, "--report", folder
    )
    assert (code, "--report" in told) == (2, True)


def test_sync_goes_on_with_what_changes_until_it_is_interrupted(capsys, model_folder, tmp_path):
    folder, store = tmp_path / "docs", tmp_path / "store"
    folder.mkdir()
    (folder / "a.txt").write_text("the gateway listens")
    words = ["index", "sync", store, folder, "--model", model_folder, "--check", "none"]
    code, printed, _ = memlm(capsys, *words, "--dry-run", "--json")
    assert (code, store.exists()) == (0, False)
    assert json.loads(printed) == {  # as of a server, whose adds the operation
        "added": ["a.txt"],
        "replaced": [],
        "deleted": [],
        "kept": [],
        "unchanged": 0,
        "num_added": 1,
        "num_replaced": 0,
        "num_deleted": 0,
        "num_kept": 0,
    }
    code, printed, _ = memlm(capsys, *words)
    assert (code, printed) == (0, "added a.txt\n1 document, 0 of them unchanged\n")
    command = [sys.executable, "-m", "memlm", *map(str, words), "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "1 document, 1 of them unchanged\n"
        (folder / "b.txt").write_text("the registry listens")
        (folder / "a.txt").unlink()
        assert [process.stdout.readline() for _ in range(3)] == [
            "added b.txt\n", "deleted a.txt\n", "1 document, 0 of them unchanged\n",
        ]  # fmt: skip
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    code, printed, _ = memlm(capsys, "index", "info", store, "--json")
    assert json.loads(printed)["documents"] == 1


def test_a_watch_tells_what_hinders_it_and_goes_on(capsys, model_folder, tmp_path):
    folder, store = tmp_path / "docs", tmp_path / "store"
    folder.mkdir()
    (folder / "a.txt").write_text("the gateway listens")
    command = [sys.executable, "-m", "memlm", "index", "sync", store, folder, "--model", model_folder]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*map(str, command), "--check", "none", "--watch"], **pipes) as process:
        assert [process.stdout.readline() for _ in range(2)] == [
            "added a.txt\n", "1 document, 0 of them unchanged\n",
        ]  # fmt: skip

        def told(words: str) -> bool:
            return any(words in line for line in process.stderr)

        with write_lock(store):
            (folder / "a.txt").rename(folder / "b.txt")
            assert told("another process")
        assert [process.stdout.readline() for _ in range(2)] == ["added b.txt\n", "deleted a.txt\n"]
        (folder / "b.txt").unlink()
        assert told("no text was found")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)


def test_hidden_files_are_read_where_that_is_asked_for(capsys, model_folder, tmp_path):
    (tmp_path / "corpus" / ".notes").mkdir(parents=True)
    for name in ("a.txt", ".notes/b.txt"):
        (tmp_path / "corpus" / name).write_text(make_text(1, 30))
    for options, num_documents in (((), 1), (("--hidden",), 2)):
        store = tmp_path / f"store-{num_documents}"
        words = ("index", "build", tmp_path / "corpus", "--model", model_folder, "--out", store, "--json", *options)
        code, out, _ = memlm(capsys, *words)
        assert (code, json.loads(out)["documents"]) == (0, num_documents)


def test_generate_prints_the_text_and_its_sources(capsys, model_folder, store_folder):
    words = ["generate", "the memory", "--model", model_folder, "--store", store_folder, "--seed", "1", "--lam", "0.9"]
    code, out, _ = memlm(capsys, *words, "--max-tokens", "10", "--show-sources")
    assert code == 0
    assert "share of memory:" in out
    assert "the model" in out
    assert "doc-" in out


def test_generate_drafts_from_a_text_and_reports_it(capsys, model_folder):
    words = ["generate", "the memory", "--model", model_folder, "-t", "0", "-n", "12", "--json"]
    plain = json.loads(memlm(capsys, *words, "--drafts", "off")[1])
    usage = plain["finished"]["usage"]
    assert (usage["steps"], usage["drafts"]) == (12, [])
    drafted = json.loads(memlm(capsys, *words, "--drafts", "4", "--draft", plain["text"])[1])
    usage = drafted["finished"]["usage"]
    assert drafted["text"] == plain["text"]
    assert usage["steps"] < usage["generated_tokens"] == 12
    assert "request" in {each["source"] for each in usage["drafts"]}
    assert sum(each["accepted"] for each in usage["drafts"]) > 0


def test_trace_prints_each_span_with_its_documents(capsys, model_folder, store_folder, corpus_folder):
    document = corpus_folder / "doc-7.txt"
    passage = document.read_text(encoding="utf-8")[200:300]
    words = ["trace", f"zebras {passage} zebra", "--model", model_folder, "--store", store_folder]
    code, out, _ = memlm(capsys, *words)
    assert code == 0
    assert document.name in out
    assert "1 place" in out
    code, out, _ = memlm(capsys, *words, "--json")
    spans = json.loads(out)["spans"]
    assert [span["places"][0]["document_id"] for span in spans] == [document.name] * len(spans)
    code, out, _ = memlm(capsys, "trace", "zebra", *words[2:])
    assert (code, "No passage" in out) == (0, True)


def add_packages_of_cuda(folder: Path) -> None:
    for name, size in (("nvidia_cublas_cu12", 550_000_000), ("triton", 200_000_000), ("nvidia_ml_py", 40_000)):
        (info := folder / f"{name}-1.0.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        (info / "RECORD").write_text(f"{name}/lib.so,sha256=abc,{size}\n{name}-1.0.dist-info/RECORD,,\n")


def test_doctor_shows_the_machine_and_what_is_missing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("memlm.model.device.fastest_device", lambda: torch.device("cpu"))
    monkeypatch.setattr("memlm.cli.doctor.distributions", lambda: distributions(path=[str(tmp_path)]))
    measured = machine()  # for seconds, so once
    monkeypatch.setattr("memlm.bench.machine.machine", lambda: measured)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr("memlm.model.files.catalog.MODELS", {"m": SimpleNamespace(path=Path("here"))})
    code, out, _ = memlm(capsys, "doctor", "--json")
    facts = json.loads(out)
    assert code == 0
    assert f"torch {version('torch')}" in facts["versions"]
    assert facts["device"].startswith("--device auto is ")
    assert not any("Not installed" in line and "http" in line for line in facts["advice"])
    for problem in ("Other processes", "No model", "CUDA"):
        assert not any(problem in line for line in facts["advice"])
    add_packages_of_cuda(tmp_path)
    monkeypatch.setattr("os.getloadavg", lambda: (1e4, 0.0, 0.0))
    monkeypatch.setattr("memlm.model.files.catalog.MODELS", {"m": SimpleNamespace(path=None)})
    monkeypatch.setattr("memlm.cli.doctor.EXTRAS", {"http": "no_such_module", "otel": "nothing.below"})
    monkeypatch.setattr("memlm.cli.doctor.ram_bytes", lambda: 1 << 30)
    code, out, _ = memlm(capsys, "doctor")
    assert code == 0
    shown = out.replace("\n", " ")
    assert "Not installed: http, otel." in shown
    for problem in ("Less than 4 GiB", "Other processes keep", "No model with a name", "3 packages for CUDA (750 MB)"):
        assert problem in shown
    assert "pip install torch --index-url https://download.pytorch.org/whl/cpu" in shown


def test_a_prompt_comes_from_a_file_or_from_standard_input(capsys, model_folder, tmp_path, monkeypatch):
    words = ["generate", "--model", model_folder, "--seed", "1", "--max-tokens", "5"]
    expected = memlm(capsys, *words, "the memory: é")
    assert expected[0] == 0
    (tmp_path / "prompt.txt").write_text("the memory: é\n", encoding="utf-8")
    assert memlm(capsys, *words, "--file", tmp_path / "prompt.txt") == expected
    for given in (["-"], ["--file", "-"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the memory: é\n".encode())))
        assert memlm(capsys, *words, *given) == expected
    assert memlm(capsys, *words)[0] == 2
    assert memlm(capsys, *words, "a", "--file", tmp_path / "prompt.txt")[0] == 2
    assert memlm(capsys, *words, "a", "--show-sources")[0] == 2


def test_help_loads_nothing_that_takes_long(tmp_path):
    run = [sys.executable, "-X", "importtime", "-m", "memlm", "--help"]
    printed = subprocess.run(run, cwd=tmp_path, check=True, capture_output=True, text=True)
    loaded = {line.rsplit("|", 1)[1].strip() for line in printed.stderr.splitlines() if line.startswith("import time:")}
    assert "memlm.cli.app" in loaded
    assert not {name.partition(".")[0] for name in loaded} & {"torch", "faiss", "numpy", "grpc", "pyarrow", "sqlite3"}
    assert not {"google.protobuf", "memlm.server.main", "memlm.language_model"} & loaded


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_text_that_standard_output_cannot_hold_is_escaped(own_store, encoding):
    command = [sys.executable, "-m", "memlm", "index", "delete", own_store, "λ 😀.md", "--dry-run"]
    settings = {**os.environ, "PYTHONIOENCODING": encoding}
    shown = subprocess.run(command, env=settings, check=True, capture_output=True, text=True).stdout
    assert shown.startswith("\\u03bb \\U0001f600.md\n")
    shown = subprocess.run([*command, "--json"], env=settings, check=True, capture_output=True, text=True).stdout
    assert json.loads(shown) == {"documents": ["λ 😀.md"]}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("words", [["--help"], ["index", "info"], ["index", "info", "--json"]])
def test_a_full_disk_behind_standard_output_is_one_line(own_store, words):
    command = [sys.executable, "-m", "memlm", *words, *[own_store][: len(words) - 1]]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("memlm: standard output, or a file, cannot be written (No space left on device); ")
    assert done.stderr.count("\n") == 1


def test_a_reader_that_leaves_ends_a_command_without_a_word(own_store):
    command = [sys.executable, "-m", "memlm", "index", "info", own_store, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    with process.stderr as problems:
        assert problems.read() == ""
    assert process.wait() == 1


def test_an_interrupt_exits_with_130_and_leaves_a_resumable_build(model_folder, tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number:02}.txt").write_text("the memory of a model can be read " * 800)
    command = [sys.executable, "-m", "memlm", "index", "build", "texts", "--model", model_folder, "--out", "s"]
    command += ["--index", "Flat", "--check", "none"]  # what comes after the texts are read
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not _checkpointed(tmp_path / "s" / "building.json"):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert re.search(r"interrupted; [\d,]+ entries of s are on disk; the same command goes on from there: memlm ", err)
    assert f"index build texts --model {quote(str(model_folder))} --out s" in err
    assert not (tmp_path / "s" / "CURRENT").exists()
    done = subprocess.run([*command, "--json"], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert json.loads(done.stdout)["resumed_entries"] > 0


def _checkpointed(journal: Path) -> int:
    """How many entries of a build a kill leaves standing."""
    return json.loads(journal.read_bytes())["entries"] if journal.exists() else 0


def test_plain_lines_of_progress_come_at_growing_intervals_and_say_something_new(capsys, monkeypatch):
    now_s = [100.0]
    monkeypatch.setattr("memlm.cli.terminal.console.time.monotonic", lambda: now_s[0])
    lines = []
    with ConsoleProgress() as progress:
        for second in range(12):
            progress("read", min(second, 9), 20)
            lines += [(second, line) for line in capsys.readouterr().err.splitlines()]
            now_s[0] += 1
        for done in (0, 1):  # a phase that nobody notices
            progress("check files", done, 1)
            now_s[0] += 0.5
        progress("check", 0, 1)
        now_s[0] += 1.5
        progress("check", 1, 1)
    assert [second for second, _ in lines] == [2, 4, 7]  # after 2, 2 and 3 s; the next would be after 4.5, at no news
    assert lines[0][1] == "read: 2 bytes of 20 bytes (10%), 18 s left, 1 bytes/s"
    assert capsys.readouterr().err == "check: 1 of 1 steps (100%)\n"


def test_numbers_that_are_none_are_null_in_json():
    assert jsonable({"a": float("nan"), "b": (float("inf"), 1.5), "c": b"\xff", "d": Path("x")}) == {
        "a": None,
        "b": [None, 1.5],
        "c": "ff",
        "d": "x",
    }


def test_documents_are_deleted_by_metadata_and_compaction_wins_room_back(capsys, model_folder, tmp_path):
    texts = [{"id": f"d{n}", "text": f"text number {n} " * 20, "license": "MIT" if n % 2 else "none"} for n in range(6)]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, texts)))
    store = tmp_path / "s"
    assert memlm(capsys, "index", "build", tmp_path / "c.jsonl", "--model", model_folder, "--out", store)[0] == 0
    printed = memlm(capsys, "index", "delete", store, "--where", "license=none", "--dry-run", "--json")[1]
    assert json.loads(printed) == {"documents": ["d0", "d2", "d4"]}
    printed = json.loads(memlm(capsys, "index", "delete", store, "--where", "license=none", "--json")[1])
    assert printed["documents"] == 3
    code, printed, _ = memlm(capsys, "index", "compact", store, "--model", model_folder, "--json")
    assert code == 0
    assert json.loads(printed)["bytes_after"] < json.loads(printed)["bytes_before"]
    assert "nothing to do" in memlm(capsys, "index", "compact", store)[1]
    code, printed, _ = memlm(capsys, "index", "verify", store, "--model", model_folder)
    assert (code, "every file" in printed) == (0, True)
    facts = json.loads(memlm(capsys, "index", "info", store, "--json")[1])
    assert (facts["documents"], facts["deleted_documents"], facts["segments"]) == (3, 0, 1)


def test_a_purge_warns_of_copies_that_still_hold_what_was_deleted(capsys, own_store, tmp_path):
    assert memlm(capsys, "index", "delete", own_store, "doc-0.txt")[0] == 0
    assert memlm(capsys, "index", "snapshot", own_store, tmp_path / "copy")[0] == 0
    code, printed, told = memlm(capsys, "index", "compact", own_store, "--purge")
    assert (code, "without 1 deleted document;" in printed) == (0, True)
    assert re.search(r"warning: \d+ files with deleted", told)
    assert "compact COPY --purge" in " ".join(told.split())
    assert memlm(capsys, "index", "compact", tmp_path / "copy", "--purge")[2] == ""


def test_every_command_takes_a_store_that_was_emptied(capsys, model_folder, corpus_folder, own_store):
    names = [path.name for path in corpus_folder.iterdir()]
    assert memlm(capsys, "index", "delete", own_store, *names)[0] == 0
    code, printed, _ = memlm(capsys, "index", "compact", own_store, "--model", model_folder, "--purge")
    assert (code, "1 segment became none, without 8 deleted documents;" in printed) == (0, True)
    for words in (
        ["index", "info", own_store],
        ["index", "verify", own_store],
        ["index", "verify", own_store, "--model", model_folder],
        ["index", "search", own_store, "the memory", "--model", model_folder],
        ["index", "compact", own_store, "--purge"],
        ["generate", "the memory", "--model", model_folder, "--store", own_store, "--max-tokens", 3],
        ["eval", corpus_folder, "--model", model_folder, "--store", own_store],
    ):
        assert memlm(capsys, *words)[0] == 0, words
    code, _, printed = memlm(capsys, "tune", corpus_folder, "--store", own_store, "--model", model_folder)
    assert (code, len(printed.strip().splitlines()[-1:])) == (1, 1), printed
    assert memlm(capsys, "index", "add", own_store, corpus_folder, "--model", model_folder)[0] == 0
    assert json.loads(memlm(capsys, "index", "info", own_store, "--json")[1])["documents"] == 8


@pytest.mark.parametrize(
    ("said", "meant"),
    [(None, None), ("1500", 1500), ("500M", 500_000_000), ("2GiB", 2 << 30), ("1.5 kB", 1500), ("0.5TiB", 1 << 39)],
)
def test_bytes_are_read_as_people_write_them(said, meant):
    assert num_bytes(said) == meant


@pytest.mark.parametrize("said", ["", "many", "5X", "1.2.3G", "-5M"])
def test_what_is_no_number_of_bytes_is_refused(said):
    with pytest.raises(typer.BadParameter, match="2GiB"):
        num_bytes(said)


def test_a_build_within_a_memory_wants_more_of_the_mass(capsys, model_folder, corpus_folder, tmp_path):
    command = ["index", "build", corpus_folder, "--model", model_folder, "--out"]
    assert memlm(capsys, *command, tmp_path / "plain")[0] == 0
    assert memlm(capsys, *command, tmp_path / "small", "--max-ram", "1GiB")[0] == 0
    manifests = [read_manifest(tmp_path / name) for name in ("plain", "small")]
    assert [manifest.spec.target for manifest in manifests] == [0.95, 0.99]
    code, _, err = memlm(capsys, *command, tmp_path / "none", "--max-ram", "1kB")
    assert (code, "smallest index" in err) == (1, True)
    assert not (tmp_path / "none").exists()
    printed = json.loads(memlm(capsys, *command, tmp_path / "dry", "--dry-run", "--json")[1])
    assert printed["entries"] > 500
    assert not (tmp_path / "dry").exists()


def test_settings_of_the_server_come_from_options_environment_and_file(tmp_path, monkeypatch):
    file = tmp_path / "server.toml"
    file.write_text(
        'model = "m"\nstore = ["a", "b"]\nport = 1234\nmax_running = 7\nsession_bytes = "1GiB"\ncache_bytes = "2GiB"\n'
        "drafts = 4\nmax_streams = 5\nmax_jobs = 6\n"
    )
    monkeypatch.setenv("MEMLM_SERVE_MAX_RUNNING", "9")
    monkeypatch.setenv("MEMLM_SERVE_DRAIN", "3")
    monkeypatch.setenv("MEMLM_SERVE_MAX_STREAMS", "8")
    done = CliRunner().invoke(app, ["serve", "--config", str(file), "--port", "99", "--print-config"])
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert (printed["port"], printed["max_running"], printed["drain_s"]) == (99, 9, 3.0)
    assert (printed["model"], printed["stores"], printed["max_session_bytes"]) == ("m", ["a", "b"], 1 << 30)
    assert (printed["max_cache_bytes"], printed["drafts"]) == (2 << 30, 4)
    assert (printed["max_streams"], printed["max_jobs"]) == (8, 6)
    for bad, says in (
        ("message_bytes = 5\n", "message_bytes is 5"), ("max_jobs = 'many'\n", "'max_jobs'"),
        ("prot = 3\n", "prot"), ("port = [\n", "TOML"), ("port = 99999999\n", "port"),
    ):  # fmt: skip
        file.write_text('model = "m"\n' + bad)
        done = CliRunner().invoke(app, ["serve", "--config", str(file), "--print-config"])
        assert done.exit_code != 0
        assert says in done.output + str(done.exception)


def test_a_setting_is_no_option():
    done = CliRunner().invoke(app, ["serve", "--model", "m", "--max-streams", "5", "--print-config"])
    assert (done.exit_code, "No such option: --max-streams" in done.output) == (2, True)
    assert "max-streams" not in CliRunner().invoke(app, ["serve", "--help"]).output


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://ann:pass@word@collector:4317", "https://***@collector:4317"),
        ("http://ann@collector:4317/v1?at=5", "http://***@collector:4317/v1?at=5"),
        ("http://collector:4317/a@b", "http://collector:4317/a@b"),
    ],
)
def test_printed_settings_hold_no_password(endpoint, shown):
    done = CliRunner().invoke(app, ["serve", "--model", "m", "--otlp", endpoint, "--print-config"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["otlp"] == shown


def test_excluded_documents_are_left_out_as_by_the_library(capsys, model_folder, corpus_folder, store_folder, lm):
    ask = ("--model", model_folder, "--store", store_folder, "--lam", 0.7)
    gone = ("--exclude-document", "doc-1.txt", "--exclude-document", "doc-[67].txt")
    options = {"max_tokens": 8, "temperature": 0, "lam": 0.7}
    words = ("generate", "the memory", *ask, "--max-tokens", 8, "--temperature", 0)
    printed = [memlm(capsys, *words, *each)[1].strip() for each in ((), gone)]
    excluded = lm.generate("the memory", exclude_documents=["doc-1.txt", "doc-[67].txt"], **options).result().text
    whole = lm.generate("the memory", **options).result().text
    assert whole != excluded
    assert [excluded.strip() in printed[1], whole.strip() in printed[0]] == [True, True]
    assert printed[0] != printed[1]
    code, _, told = memlm(capsys, *words, "--exclude-document", "nobody")
    assert (code, "no document 'nobody' to exclude" in " ".join(told.split())) == (1, True)


def test_inspect_prints_heads_and_writes_a_report(capsys, model_folder, tmp_path):
    page = tmp_path / "report.html"
    code, out, _ = memlm(capsys, "inspect", model_folder, "some text", "--out", page)
    assert code == 0
    assert "2 layers of 4 heads: 0 induction" in out
    assert "try no layer" in out
    assert "the given text" in page.read_text(encoding="utf-8")
    code, out, _ = memlm(capsys, "inspect", model_folder, "--json")
    assert code == 0
    assert len(json.loads(out)["heads"]) == 8
    code, _, err = memlm(capsys, "inspect", model_folder, "--out", tmp_path / "nowhere" / "report.html")
    assert code == 1
    assert "give a file in a folder that is there" in err
