"""The scripts of examples/ run, on a tiny model, and print what they promise."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from chats import PLAIN, PLAIN_TOKENS, give_template
from conftest import SHAPE
from running import RunningServer

from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import save_checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {path.name for path in EXAMPLES.glob("*.py")}


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("models") / "chats"
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**SHAPE, "context_length": 512})
    save_checkpoint(folder, Decoder(config), tokenizer)
    give_template(folder, PLAIN, PLAIN_TOKENS)
    return folder


def run(script: str, *words: object) -> list[str]:
    command = [sys.executable, str(EXAMPLES / script), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_page_names_every_script_and_every_script_is_run():
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    source = Path(__file__).read_text(encoding="utf-8")
    for script in SCRIPTS:
        assert f"[{script}]({script})" in page
        assert f'run("{script}"' in source, script


def test_attribute_names_a_document_for_each_token(model_folder):
    lines = run("attribute.py", model_folder)
    assert len(lines) == 8
    assert all("from memory" in line for line in lines)
    assert any(line.endswith(":1") for line in lines)


def test_forget_shows_that_a_fact_is_gone(model_folder):
    before, within, after = (float(line.split()[-1]) for line in run("forget.py", model_folder))
    assert before == after < within


def test_chat_answers_twice(chat_model):
    assert run("chat_with_notes.py", chat_model)


def test_score_prints_a_line_a_file(model_folder, corpus_folder):
    lines = run("score_corpus.py", model_folder, corpus_folder, corpus_folder)
    assert [line.split("/")[-1] for line in lines] == [f"doc-{number}.txt" for number in range(8)]


def test_batch_prints_json_lines(model_folder):
    found = [json.loads(line) for line in run("batch_generation.py", model_folder)]
    assert found[0]["prompt"] == "The capital of France is"
    assert all(each["tokens"] == 12 for each in found)


@pytest.mark.server
def test_the_openai_package_streams(tmp_path, model_folder, store_folder):
    options = ("--threads", "1", "--http-port", "0")
    with RunningServer(tmp_path / "log", model_folder, store_folder, options=options) as server:
        assert run("openai_client.py", f"{server.http_url}/v1")
