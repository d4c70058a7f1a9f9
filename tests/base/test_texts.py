"""A byte order mark is no text, and says which encoding a text has, wherever a text comes in."""

import io
import shutil
import sys
from pathlib import Path

import pytest

from memlm.api.chat import Message
from memlm.base.texts import InUtf8, text_of
from memlm.cli.ask.chat_shell import piped_lines
from memlm.cli.terminal.options import read_text
from memlm.language_model import load
from memlm.server.frontend.auth import Authenticator
from memlm.server.http.schema import parse_json

ENCODINGS = ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"]
TEXT = "ä\x00\u2028日 \U0001f642\r\nz"


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("text", ["", "a", TEXT])
def test_a_text_is_the_same_however_its_bytes_come(encoding, text):
    raw = f"\ufeff{text}".encode(encoding)
    assert text_of(raw) == text
    for size in (1, 2, 3, 5):
        reader = InUtf8()
        pieces = [reader.feed(raw[begin : begin + size]) for begin in range(0, len(raw), size)]
        assert (b"".join(pieces) + reader.feed(b"", final=True)).decode() == text


@pytest.mark.parametrize("raw", [b"", b"a", b"\xef\xbb", b"ab\xff\xfe", b"\xff", b"a\xef\xbb\xbf"])
def test_bytes_without_a_mark_are_passed_on(raw):
    reader = InUtf8()
    assert reader.feed(raw) + reader.feed(b"", final=True) == raw


@pytest.mark.parametrize("raw", [b"\xff\xfea", b"\xff\xfe\x00\xd8", b"\x00\x00\xfe\xffabcd", b"\xef\xbb\xbf\xff"])
def test_a_text_that_is_not_what_its_mark_says_is_an_error(raw):
    with pytest.raises(UnicodeDecodeError):
        text_of(raw)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_model_whose_files_begin_with_marks_answers_the_same(tmp_path, model_folder, encoding):
    """As an editor or PowerShell saved them, with line ends of Windows in the template."""
    shutil.copytree(model_folder, tmp_path / "model")
    template = "{% for message in messages %}\n{{ message.content }}\n{% endfor %}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    shutil.copytree(tmp_path / "model", tmp_path / "marked")
    names = [path.name for path in (tmp_path / "model").iterdir() if path.suffix in (".json", ".jinja")]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} <= {*names}
    for name in names:
        text = (tmp_path / "model" / name).read_text(encoding="utf-8")
        (tmp_path / "marked" / name).write_bytes(text.replace("\n", "\r\n").encode(encoding))
    messages = [Message("user", "the memory")]
    with load(tmp_path / "model") as plain, load(tmp_path / "marked") as marked:
        rendered = [each.checkpoint.chat_template.render(messages) for each in (plain, marked)]
        answers = [each.chat(messages, max_tokens=4, temperature=0).result().text for each in (plain, marked)]
    assert rendered[0] == rendered[1]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_bodies_tokens_and_prompts_may_begin_with_a_mark(tmp_path: Path, encoding):
    assert parse_json('{"a": "ä"}'.encode(encoding), {"properties": {"a": {"type": "string"}}}) == {"a": "ä"}
    (tmp_path / "prompt").write_bytes("ä\n".encode(encoding))
    assert read_text(tmp_path / "prompt") == "ä\n"
    secret = "s" * 40
    (tmp_path / "tokens.toml").write_bytes(f'[[token]]\r\nname = "ann"\r\nsecret = "{secret}"\r\n'.encode(encoding))
    (tmp_path / "tokens.toml").chmod(0o600)
    caller = Authenticator(tmp_path / "tokens.toml").authenticate([("authorization", f"Bearer {secret}")])
    assert caller.name == "ann"


def test_piped_lines_begin_behind_a_mark(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf/help\n\xef\xbb\xbfa\xff\n")))
    assert [*piped_lines(echo=False)] == ["/help\n", "\ufeffa\ufffd\n"]
