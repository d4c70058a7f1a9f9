"""`memlm chat`: several turns, a memory that changes between them, and no error that ends it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from chats import save_chat_model
from running import PATIENCE_S, RunningServer, wait_until

from memlm.cli import main
from memlm.cli.ask.conversation import Conversation
from memlm.client import Client, Tls
from memlm.data.corpus import Document
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load

GREEDY = ("--temperature", "0", "--max-tokens", "6")
# Every entry counts alike, and texts repeat a letter, so that an answer comes from the document with the most of them.
# It is so short that the guard against loops finds none.
OPTIONS = ("--temperature", "0", "--max-tokens", "2", "--lam", "0.9", "--k", "400", "--knn-temperature", "1e9")
# Makes its terminal the controlling one, so that Ctrl-C is a signal, which a shell's background jobs ignore.
AT_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, sys.argv[1:])
"""
FACT, LONGER = "eeeeee", "oooooooooo"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("models") / "chat", tokenizer)


@pytest.fixture
def store(tmp_path: Path, model: Path) -> Path:
    return build_index(model, [Document("first", "tttt")], tmp_path / "notes").path


@pytest.fixture
def lm(model: Path) -> Iterator[LanguageModel]:
    with load(model) as lm:
        yield lm


class Piped:
    """`memlm chat` in this process, with lines on its standard input."""

    def __init__(self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, words: tuple[object, ...], *lines: str | bytes) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        data = b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines)
        with self._monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["memlm", *map(str, words)])
            patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
            code = 0
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def objects(self, words: tuple[object, ...], *lines: str) -> list[dict[str, Any]]:
        """What `--json` prints."""
        code, out, err = self((*words, "--json"), *lines)
        assert (code, err) == (0, "")
        return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def piped(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Piped:
    return Piped(capsys, monkeypatch)


def answers_of(lm: LanguageModel, *questions: str, **options: Any) -> list[str]:
    """The answers of a conversation of which the whole is sent at each turn."""
    spoken, answers = list[dict[str, str]](), list[str]()
    for question in questions:
        spoken.append({"role": "user", "content": question})
        answers.append(lm.chat(spoken, **options).result().text)
        spoken.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_each_line_of_a_pipe_is_answered_in_one_conversation(piped, model, lm):
    expected = answers_of(lm, "the memory", "of a model", temperature=0, max_tokens=6)
    answered = piped.objects(("chat", "--model", model, *GREEDY), "the memory", "", "of a model")
    assert [each["text"] for each in answered] == expected
    code, out, err = piped(("chat", "--model", model, *GREEDY), "the memory", "of a model")
    assert (code, err) == (0, "")
    asked = zip(("the memory", "of a model"), expected, strict=True)
    assert out == "".join(f"> {text}\n{answer}\n" for text, answer in asked)


def test_a_new_conversation_and_a_system_message_begin_anew(piped, model, lm):
    (first,) = answers_of(lm, "the memory", temperature=0, max_tokens=6)
    spoken = [{"role": "system", "content": "a page"}, {"role": "user", "content": "the memory"}]
    with_system = "".join(token.text for token in lm.chat(spoken, temperature=0, max_tokens=6))
    lines = ("the memory", "/reset", "the memory", "/reset", "/system a page", "the memory", "/system")
    found = piped.objects(("chat", "--model", model, *GREEDY), *lines)
    assert [each["text"] for each in found if "text" in each] == [first, first, with_system]
    assert found[-1] == {"system": "a page"}
    (started,) = piped.objects(("chat", "--model", model, "--system", "a page", *GREEDY), "the memory")
    assert started["text"] == with_system


def ids_in(answer: dict[str, Any]) -> set[str]:
    return {source["document_id"] for source in answer["sources"]}


def test_what_is_remembered_is_used_and_what_is_forgotten_is_not(piped, model, store, tmp_path):
    (tmp_path / "added.txt").write_text(LONGER)
    words = ("chat", "--model", model, "--store", store, *OPTIONS)
    before, remembered, after, added, also = piped.objects(
        words, "the", f"/remember {FACT}", "the", f"/add {tmp_path / 'added.txt'}", "the"
    )
    note = remembered["remembered"]
    assert remembered == {"remembered": note, "store": "notes"}
    assert added == {"added": ["added.txt"], "store": "notes"}
    assert [ids_in(answer) for answer in (before, after, also)] == [{"first"}, {note}, {"added.txt"}]
    found = piped.objects(words, "/forget added.txt", "the", f"/forget {note}", "the", "/sources")
    assert [ids_in(answer) for answer in found if "sources" in answer] == [{note}, {"first"}, {"first"}]


def test_a_number_of_passages_holds_for_the_next_answers(piped, model, store):
    words = ("chat", "--model", model, "--store", store, *GREEDY)
    lines = ("tttt", "/passages 0", "tttt", "/passages 1", "tttt", "/passages auto", "tttt")
    found = piped.objects(words, *lines)
    assert [len(each["passages"]) for each in found if "passages" in each] == [1, 0, 1, 1]
    assert [each["num_passages"] for each in found if "num_passages" in each] == [0, 1, None]


def test_a_new_folder_becomes_a_datastore(piped, model, tmp_path):
    folder = tmp_path / "new"
    alone, made, answer = piped.objects(
        ("chat", "--model", model, "--store", folder, *OPTIONS), "the", f"/remember {FACT}", "the"
    )
    assert alone["sources"] == []
    assert (made["store"], ids_in(answer)) == ("new", {made["remembered"]})
    (again,) = piped.objects(("chat", "--model", model, "--store", folder, *OPTIONS), "the")
    assert ids_in(again) == {made["remembered"]}


def test_no_error_ends_the_conversation(piped, model, store, tmp_path):
    words = ("chat", "--model", model, "--store", store, *OPTIONS)
    wrong = {
        "/sources": "no answer yet",
        "/nonsense": "there is no /nonsense",
        "/remember": "/remember needs TEXT",
        "/passages many": "no number of passages",
        "/passages 1000": "num_passages is 1000",
        "/forget nobody": "no document 'nobody' in notes",
        f"/add {tmp_path / 'nowhere'}": "no file or folder at",
        "/remember a\0b": "NUL",
        "the memory " * 400: "shorten the prompt",
        "a\0b": "NUL",
    }
    code, out, err = piped(words, *wrong, "//exit", "/help", "/exit", "not answered")
    assert code == 1
    assert err.count("\n") == len(wrong)
    for line, says in zip(err.splitlines(), wrong.values(), strict=True):
        assert line.startswith("memlm: ")
        assert says in line
    assert "/remember TEXT" in out
    assert len(out.splitlines()) > 8  # the answer to "/exit", and the commands


def test_bytes_that_are_no_text_are_answered_too(piped, model):
    assert piped(("chat", "--model", model, *GREEDY), b"the \xff memory")[0] == 0


def test_without_a_datastore_nothing_is_remembered(piped, model):
    code, out, err = piped(("chat", "--model", model, *GREEDY), "/remember a fact", "the memory", "/sources")
    assert code == 1
    assert "no datastore to write to; start with --store FOLDER" in err
    assert "the model alone" in out


def test_wrong_use_and_a_model_without_a_template_are_told_at_once(piped, model, model_folder, tmp_path, tokenizer):
    for words in (
        ("chat",), ("chat", "--model", model, "--lam", "0.5"), ("chat", "--target", "localhost:1", "--store", "s"),
        ("chat", "--model", model, "--target", "localhost:1"),
    ):  # fmt: skip
        assert piped(words, "hi")[0] == 2
    bare = save_chat_model(tmp_path / "bare", tokenizer)
    (bare / "tokenizer_config.json").unlink()
    code, out, err = piped(("chat", "--model", bare), "hi")
    assert (code, out) == (1, "")
    assert "has no chat template" in err


def test_a_full_context_leaves_the_oldest_turns_out(lm):
    conversation = Conversation(lm, {"temperature": 0, "max_tokens": 40}, system="a page")
    for number in range(12):
        answer = "".join(token.text for token in conversation.ask(f"the memory of page {number}"))
        conversation.keep(answer)
    turns = conversation._turns
    assert 2 <= len(turns) < 24
    assert [turn.role for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    assert turns[-2].content == "the memory of page 11"
    messages = [{"role": "system", "content": "a page"}]
    messages += [{"role": turn.role, "content": turn.content} for turn in turns[:-1]]
    assert "".join(token.text for token in lm.chat(messages, temperature=0, max_tokens=40)) == turns[-1].content


def test_more_tokens_than_the_context_has_are_not_asked_for(lm):
    conversation = Conversation(lm, {"temperature": 0, "max_tokens": 5000, "stop": "e"})
    assert list(conversation.ask("the memory"))


def test_a_turn_is_asked_behind_all_others_and_the_model_reads_it_alone(lm):
    conversation, spoken = Conversation(lm, {"temperature": 0, "max_tokens": 6}), list[dict[str, str]]()
    for question in ("the memory", "of a model", "can be read"):
        stream = conversation.ask(question)
        answer = "".join(token.text for token in stream)
        spoken.append({"role": "user", "content": question})
        assert answer == "".join(token.text for token in lm.chat(spoken, temperature=0, max_tokens=6))
        spoken.append({"role": "assistant", "content": answer})
        conversation.keep(answer)
    assert 2 * stream.finished.usage.cached_tokens > stream.finished.usage.prompt_tokens


def test_a_server_is_talked_to_alike(piped, model, store, lm, tmp_path):
    options = ("--threads", "1", "--store-dir", str(tmp_path / "stores"))
    with RunningServer(tmp_path / "log", model, store, options=options) as server:
        with Client(server.address) as client:
            client.wait_until_ready()
        words = ("chat", "--target", server.address, *OPTIONS)
        expected = answers_of(lm, "the memory", "of a model", temperature=0, max_tokens=6)
        alone = ("chat", "--target", server.address, "--no-store", *GREEDY)
        answered = piped.objects(alone, "the memory", "of a model")
        assert [each["text"] for each in answered] == expected
        remembered, answer, forgot, last = piped.objects(words, f"/remember {FACT}", "the", "/forget first", "the")
        assert remembered["store"] == forgot["store"] == "notes"
        assert ids_in(answer) == ids_in(last) == {remembered["remembered"]}
        code, out, err = piped(("chat", "--target", server.address, *OPTIONS), "/forget nobody", "the memory")
        assert code == 1
        assert "no document 'nobody' in notes" in err
        assert out
        with Client(server.address) as client:
            assert client.list_sessions() == ()


def test_a_server_with_tls_and_tokens_is_talked_to_alike(piped, model, lm, tmp_path):
    authority, (ca, cert, key) = trustme.CA(), (tmp_path / name for name in ("ca.pem", "cert.pem", "key.pem"))
    authority.cert_pem.write_to_path(str(ca))
    issued = authority.issue_cert("localhost", "127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(str(key))
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (tmp_path / "tokens.toml").write_text('[[token]]\nname = "ann"\nsecret = "ann\'s own secret 0"\n')
    files = ("--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca))
    options = ("--threads", "1", "--auth-file", str(tmp_path / "tokens.toml"), *files)
    trust, proof, token = ("--ca", ca), ("--cert", cert, "--key", key), ("--token", "ann's own secret 0")
    with RunningServer(tmp_path / "log", model, options=options) as server:
        target = ("--target", f"localhost:{server.address.rpartition(':')[2]}")
        with Client(target[1], token=token[1], tls=Tls(ca, cert, key)) as client:
            client.wait_until_ready()
        answered = piped.objects(("chat", *target, *trust, *proof, *token, *GREEDY), "the memory")
        assert [each["text"] for each in answered] == answers_of(lm, "the memory", temperature=0, max_tokens=6)
        for some, says in (((*trust, *proof), "token"), ((*trust, *token), ""), ((*proof, *token), "")):
            code, out, err = piped(("chat", *target, *some, "--timeout", "3"), "the memory")
            assert (code, out) == (1, ""), some
            assert err.startswith("memlm: ")
            assert says in err
    code, _, err = piped(("chat", "--model", model, *trust))
    assert code == 2
    assert "give --target HOST:PORT" in " ".join(err.replace("│", " ").split())


class Terminal:
    """`memlm chat` in a pseudo-terminal."""

    def __init__(self, state: Path, *words: object) -> None:
        self._main, side = pty.openpty()
        environment = os.environ | {"XDG_STATE_HOME": str(state), "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, sys.executable, "-m", "memlm", "chat", *map(str, words)],
            stdin=side, stdout=side, stderr=side, env=environment, start_new_session=True,
        )  # fmt: skip
        os.close(side)
        os.set_blocking(self._main, False)
        self.output = ""

    def type(self, keys: str) -> None:
        os.write(self._main, keys.encode())

    def shows(self, pattern: str) -> bool:
        """Whether a pattern stands in what was printed so far."""
        try:
            while data := os.read(self._main, 1 << 16):
                self.output += data.decode(errors="replace")
        except OSError:  # nothing now, or the other side is closed
            pass
        return bool(re.search(pattern, self.output))

    def forget(self) -> None:
        self.output = ""

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._main)


def test_at_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(tokenizer, tmp_path):
    model, state = save_chat_model(tmp_path / "long", tokenizer, context_length=40_000), tmp_path / "state"
    terminal = Terminal(state, "--model", model, "--temperature", "0", "--max-tokens", "30000")
    try:
        wait_until(lambda: terminal.shows(r"Ctrl-D leaves\.[^>]*> "))
        terminal.type("/hel\t\n")
        wait_until(lambda: terminal.shows("Anything else is a message"))
        terminal.forget()
        terminal.type("the memory\n")
        wait_until(lambda: terminal.shows(r"the memory\r\n[^>]{200,}"))
        terminal.type("\x03")
        wait_until(lambda: terminal.shows(r"tokens · stopped[^>]*> "))
        terminal.forget()
        terminal.type("half a line\x03")
        wait_until(lambda: terminal.shows("Ctrl-D leaves[^>]*> "))
        terminal.type("/sources\n")
        wait_until(lambda: terminal.shows(r"the model alone"))
        terminal.type("\x04")
        assert terminal.process.wait(PATIENCE_S) == 0
    finally:
        terminal.close()
    history = state / "memlm" / "chat_history"
    assert "the memory" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
