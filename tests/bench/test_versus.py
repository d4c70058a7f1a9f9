"""The comparison with llama.cpp, whose package a contributor may install."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from memlm.bench import llama_cpp
from memlm.bench.llama_cpp import LlamaCpp, convert
from memlm.cli.app import app
from memlm.language_model import load
from memlm.model.files.catalog import SMOLLM2

needs_llama_cpp = pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
needs_smollm2 = pytest.mark.skipif(SMOLLM2.path is None, reason="smollm2 is not installed: `memlm models pull smollm2`")


def test_without_the_package_the_command_names_it(monkeypatch):
    monkeypatch.setattr(llama_cpp, "find_spec", lambda _: None)
    failed = CliRunner().invoke(app, ["bench", "versus"])
    assert failed.exit_code != 0
    assert "llama-cpp-python" in str(failed.exception)


@pytest.mark.real_model
@needs_llama_cpp
@needs_smollm2
def test_both_sides_continue_a_text_alike(tmp_path: Path):
    """The same weights, as they are and converted: the sides compute the same."""
    path = SMOLLM2.require()
    prompt = load(path).tokenizer.encode("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,").tolist()
    for file in (path, convert(path, "Q8_0", tmp_path / "model.gguf")):
        expected = [token.id for token in load(file).generate(prompt, max_tokens=8, temperature=0)]
        theirs = LlamaCpp(file, streams=2, context=64, threads=1)
        drawn = [theirs.read(prompt, streams=2)]
        for number in range(7):
            drawn.append(theirs.step(drawn[-1], len(prompt) + number))
        theirs.close()
        assert [list(stream) for stream in zip(*drawn, strict=True)] == [expected, expected]
