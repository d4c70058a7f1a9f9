"""The blocks of the pages that people learn from, run as they stand but for the ports (`support/document_blocks.py`).

README and the tutorial (slow: a minute or two) run with the model that they name, and their blocks print the promised
texts. All pages run with a tiny model of the same name too, which no machine has to install.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chats import PLAIN, PLAIN_TOKENS, give_template
from command_forkserver import CommandForker
from conftest import SHAPE
from document_blocks import Reader, blocks_of, run_page
from gguf_files import write_gguf
from other_families import save_as_others_do
from transformers import AutoModelForCausalLM

from memlm.data.tokenizer import Tokenizer
from memlm.model import Decoder, ModelConfig
from memlm.model.files.catalog import MODELS
from memlm.model.files.checkpoint import save_checkpoint

ROOT = Path(__file__).parents[1]
README, TUTORIAL = ROOT / "README.md", ROOT / "docs/tutorial.md"
RUNNING = (
    "adapters", "changes", "cluster", "concepts", "datastore", "generate", "http", "inspect", "integrations", "model",
    "operation", "prompting", "search", "security", "service", "when",
)  # fmt: skip
PAGES = [README, TUTORIAL, *(ROOT / f"docs/{name}.md" for name in RUNNING)]
NOTES = ROOT / "examples/notes"


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandForker]:
    forker = CommandForker(tmp_path_factory.mktemp("commands"))
    yield forker
    forker.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder: the notes, text that is not in them, and the page's relative paths."""
    shutil.copytree(NOTES, tmp_path / "examples/notes")
    shutil.copytree(NOTES, tmp_path / "notes")
    for name, page in {"heldout": "security.md", "unseen": "model.md"}.items():
        (tmp_path / name).mkdir()
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        for part in range(2):
            (tmp_path / name / f"part-{part}.md").write_text(text[part * 1500 :][:1500], encoding="utf-8")
    return tmp_path


@pytest.fixture
def folder_with_model(folder: Path, tokenizer: Tokenizer) -> Path:
    """The same with a tiny model, which comes before the catalog's, and two that others made."""
    for note in folder.glob("**/notes/*.md"):
        note.write_text(note.read_text(encoding="utf-8")[:300], encoding="utf-8")  # a token a byte, for this model
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**SHAPE, "context_length": 512})
    save_checkpoint(folder / "smollm2", Decoder(config), tokenizer)
    give_template(folder / "smollm2", PLAIN, PLAIN_TOKENS)
    save_as_others_do("llama", folder / "my-model", tokenizer)
    vocabulary = json.loads(tokenizer._backend.to_str())["model"]
    tokens = [tokenizer._backend.id_to_token(number) for number in range(tokenizer.vocab_size)]
    merges = [" ".join(merge) for merge in vocabulary["merges"]]
    described = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges, "eos_token_id": tokenizer.end_id}
    model = AutoModelForCausalLM.from_pretrained(folder / "my-model")
    write_gguf(folder / "my-model.gguf", model, described)
    return folder


@pytest.mark.packaging
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_blocks_of_pages_run(page, folder_with_model, forker):
    run_page(page, folder_with_model, forker.path, checks_output=False)


@pytest.mark.packaging
@pytest.mark.real_model
@pytest.mark.skipif(MODELS["smollm2"].path is None, reason="not installed; `memlm models pull smollm2` installs it")
@pytest.mark.parametrize(
    "page", [pytest.param(README, id="README"), pytest.param(TUTORIAL, id="tutorial", marks=pytest.mark.slow)]
)
def test_pages_print_what_they_promise(page, folder, forker):
    run_page(page, folder, forker.path, checks_output=True)


@pytest.mark.packaging
def test_a_block_that_fails_fails_the_page(folder_with_model, forker):
    page = folder_with_model / "page.md"
    page.write_text("```sh\nfalse\ntrue\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, folder_with_model, forker.path, checks_output=False)
    page.write_text("```sh\nmemlm index info nothing | cat\n```\n")
    with pytest.raises(AssertionError, match="nothing"):
        run_page(page, folder_with_model, forker.path, checks_output=False)
    page.write_text("```python\nimport memlm\nmemlm.load('nothing')\n```\n")
    with pytest.raises(AssertionError, match="nothing"):
        run_page(page, folder_with_model, forker.path, checks_output=False)
    page.write_text("<!-- prints: b -->\n```sh\necho a\n```\n")
    with pytest.raises(AssertionError, match="prints no 'b'"):
        run_page(page, folder_with_model, forker.path, checks_output=True)
    page.write_text("<!-- file: a.toml -->\n```toml\nport = 50051\n```\n```sh\ngrep port a.toml\n```\n")
    with Reader(folder_with_model, forker.path) as reader:
        assert [reader.run(block) for block in blocks_of(page)] == ["", f"port = {reader.ports['50051']}\n"]


def test_every_block_of_a_page_is_found():
    for page in PAGES:
        fences = re.findall(r"^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert 2 * len(blocks_of(page)) == len(fences), page


def test_the_first_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z]+)`", README.read_text(encoding="utf-8")):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)
