"""The harness gets the figures that memlm gives."""

import json
import math
import re
from pathlib import Path

import lm_eval.tasks
import pytest
from chats import PLAIN, PLAIN_TOKENS, give_template
from conftest import SHAPE
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer
from typer.testing import CliRunner

import memlm
from memlm.cli.app import app
from memlm.data.corpus import Corpus
from memlm.data.tokenizer import Tokenizer
from memlm.errors import InvalidInput
from memlm.evaluation import evaluate
from memlm.integrations.lm_eval import MemlmLM
from memlm.language_model import LanguageModel
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint

RETRIEVAL = {"lam": 0.4, "k": 4, "knn_temperature": 2.0}
TASK = """
task: own_rolling
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - metric: bits_per_byte
  - metric: word_perplexity
"""


pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what the harness imports


def asked(kind: str, *arguments: tuple) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


@pytest.fixture
def wrapped(lm: LanguageModel) -> MemlmLM:
    return MemlmLM(lm, **RETRIEVAL)


def test_log_likelihoods_are_those_of_memlm(wrapped, lm):
    pairs = [("the memory", " of a model"), ("", "a page"), ("it is silent:", " the"), ("a " * 100, "page")]
    found = wrapped.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs[:3], found, strict=False):
        expected, expected_greedy = lm.loglikelihood(context, continuation, **RETRIEVAL)
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert is_greedy == expected_greedy
    assert found[3][0] < 0  # of a context that lost its beginning
    spaced, unspaced = wrapped.loglikelihood(
        asked("loglikelihood", ("the memory ", "of a model"), ("the memory", " of a model")), disable_tqdm=True
    )
    assert spaced == unspaced
    alone = MemlmLM(lm, use_store=False).loglikelihood(asked("loglikelihood", pairs[0]), disable_tqdm=True)
    assert alone[0][0] == pytest.approx(lm.loglikelihood(*pairs[0], use_store=False)[0], abs=1e-4)
    assert alone[0][0] != pytest.approx(found[0][0], abs=1e-4)


def test_rolling_log_likelihoods_are_scores(wrapped, lm, corpus_folder):
    texts = [path.read_text() for path in sorted(corpus_folder.iterdir())[:3]]
    found = wrapped.loglikelihood_rolling(asked("loglikelihood_rolling", *((text,) for text in texts)))
    assert found == pytest.approx([-lm.score(text, **RETRIEVAL).nll for text in texts])


def test_generation_ends_at_a_stop_string(wrapped, lm):
    options = {"max_gen_toks": 12, "do_sample": False}
    stop = {"until": [" a"], **options}
    requests = asked("generate_until", ("the memory", options), ("the memory", stop))
    whole, cut = wrapped.generate_until(requests, disable_tqdm=True)
    assert whole == lm.generate("the memory", max_tokens=12, temperature=0, **RETRIEVAL).result().text
    assert cut == whole.partition(" a")[0]


def test_generation_samples_where_it_is_asked_to(wrapped, lm):
    """A harness's tasks carry a temperature beside do_sample: false, and then it is not used."""
    options = {"max_gen_toks": 12, "temperature": 2.0, "top_k": 50}
    asking = [("the memory", {**options, "do_sample": do_sample}) for do_sample in (True,) * 4 + (False,) * 2]
    *sampled, one, other = wrapped.generate_until(asked("generate_until", *asking), disable_tqdm=True)
    greedy = lm.generate("the memory", max_tokens=12, temperature=0, **RETRIEVAL).result().text
    assert one == other == greedy
    assert len({*sampled, greedy}) > 2
    (unsaid,) = wrapped.generate_until(asked("generate_until", ("the memory", options)), disable_tqdm=True)
    assert unsaid == greedy


def test_a_chat_keeps_its_special_tokens(tmp_path, tokenizer: Tokenizer):
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **{**SHAPE, "context_length": 256})
    save_checkpoint(tmp_path, Decoder(config), tokenizer)
    give_template(tmp_path, PLAIN, PLAIN_TOKENS)
    own = LanguageModel(load_checkpoint(tmp_path))
    chat = MemlmLM(own)
    messages = [{"role": "user", "content": "a page"}]
    text = chat.apply_chat_template(messages)
    (found,) = chat.generate_until(asked("generate_until", (text, {"max_gen_toks": 8})), disable_tqdm=True)
    assert found == own.chat(messages, max_tokens=8, temperature=0).result().text
    assert chat.chat_template(True) == PLAIN
    assert own.info.tokenizer_fingerprint in chat.tokenizer_name


@pytest.fixture
def own_tasks(tmp_path: Path, corpus_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    texts = [path.read_text() for path in sorted(corpus_folder.iterdir())]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "own.yaml").write_text(TASK.format(file=tmp_path / "texts.jsonl"))
    return tmp_path


def test_a_task_of_the_harness_gives_the_figures_of_memlm_eval(lm, corpus_folder, own_tasks):
    manager = TaskManager(include_path=str(own_tasks), include_defaults=False)
    done = simple_evaluate(model=MemlmLM(lm), tasks=["own_rolling"], task_manager=manager, bootstrap_iters=0)
    total = evaluate(lm, Corpus([corpus_folder])).total
    assert done["results"]["own_rolling"]["bits_per_byte,none"] == pytest.approx(total.bits_per_byte, rel=1e-4)


def test_the_command_prints_the_table_of_the_harness(model_folder, store_folder, own_tasks, monkeypatch, capfd):
    monkeypatch.chdir(own_tasks)  # which is no git repository
    words = ["lm-eval", "--model", model_folder, "--store", store_folder, "--tasks", "own_rolling", "--limit", 2]
    done = CliRunner().invoke(app, [*map(str, words), "--include", str(own_tasks)])
    assert done.exit_code == 0, done.output
    assert "bits_per_byte" in done.output
    assert "own_rolling" in done.output
    assert "git repository" not in capfd.readouterr().err


WIKITEXT = """
include: {tasks}/wikitext/wikitext.yaml
task: local_wikitext
dataset_path: json
dataset_name: null
dataset_kwargs: {{data_files: {{test: {file}}}}}
training_split: null
validation_split: null
"""
# In the notation of WikiText, which the task undoes before it asks the model, and plain.
PAGES = [
    " = Valkyria = \n\n The game , with its 1 @,@ 024 levels , is a role @-@ playing game . It sold 30 @.@ 5 . \n",
    "The memory of a model is silent. A page reads it, and the page is found.\n",
]


@pytest.fixture
def local_wikitext(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"page": page}) + "\n" for page in PAGES))
    tasks = Path(lm_eval.tasks.__file__).parent
    (tmp_path / "wikitext.yaml").write_text(WIKITEXT.format(tasks=tasks, file=tmp_path / "pages.jsonl"))
    return tmp_path


def test_wikitext_on_a_local_file_gives_the_figures_of_memlm_eval(lm, local_wikitext):
    manager = TaskManager(include_path=str(local_wikitext), include_defaults=False)
    done = simple_evaluate(model=MemlmLM(lm), tasks=["local_wikitext"], task_manager=manager, bootstrap_iters=0)
    texts = [wikitext_detokenizer({"page": page}) for page in PAGES]
    assert texts[0] != PAGES[0]
    assert texts[1] == PAGES[1]
    total = evaluate(lm, Corpus([memlm.Document(str(number), text) for number, text in enumerate(texts)])).total
    results = done["results"]["local_wikitext"]
    # The task counts bytes and words of the pages as they are, and the loss of the texts.
    num_bytes = sum(len(page.encode()) for page in PAGES)
    num_words = sum(len(re.split(r"\s+", page)) for page in PAGES)
    assert results["bits_per_byte,none"] * num_bytes * math.log(2) == pytest.approx(total.nll, rel=1e-5)
    assert math.log(results["word_perplexity,none"]) * num_words == pytest.approx(total.nll, rel=1e-5)


SIZED = """
task: own_sized
custom_dataset: !function sized.dataset
dataset_path: ""
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{size}}"
generation_kwargs: {max_gen_toks: 2, until: []}
process_results: !function sized.results
metric_list: [{metric: size, aggregation: mean, higher_is_better: true}]
"""
SIZED_CODE = """
import datasets
from lm_eval.tasks.ruler.common_utils import get_tokenizer, resolve_tokenizer_name

def dataset(max_seq_lengths, **settings):
    tokenizer = get_tokenizer(resolve_tokenizer_name(settings))
    rows = [{"text": "the page", "size": len(tokenizer("the page").input_ids) + size} for size in max_seq_lengths]
    return {"test": datasets.Dataset.from_list(rows, split=datasets.Split.TEST)}

def results(doc, results):
    return {"size": doc["size"]}
"""


def test_tasks_that_make_their_texts_get_the_models_tokenizer_and_the_settings(tmp_path, model_folder, lm, monkeypatch):
    """As those of RULER, which need packages and minutes."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "sized.yaml").write_text(SIZED)
    (tmp_path / "sized.py").write_text(SIZED_CODE)
    words = ["lm-eval", "--model", str(model_folder), "--tasks", "own_sized", "--include", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, [*words, "--metadata", '{"max_seq_lengths": [1000]}'])
    assert done.exit_code == 0, done.output
    results = json.loads(done.stdout[done.stdout.index("{") :])["results"]["own_sized"]
    assert results["size,none"] == 1000 + len(lm.tokenize("the page"))


def test_settings_that_are_no_object_are_refused(model_folder):
    for text in ("[1]", "{", "1"):
        done = CliRunner().invoke(app, ["lm-eval", "--model", str(model_folder), "--tasks", "x", "--metadata", text])
        assert isinstance(done.exception, InvalidInput)
        assert text in str(done.exception)
