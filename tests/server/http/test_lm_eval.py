"""The harness's own client of completions, against our port: the figures of `memlm.integrations.lm_eval`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chats import CHATML, PLAIN, save_chat_model
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from lm_eval.utils import RemoteTokenizer
from running import RunningServer
from texts import make_text

from memlm.api.generation import Finished, FinishReason, Usage
from memlm.api.scoring import TokenScore
from memlm.data.tokenizer import Tokenizer
from memlm.integrations.lm_eval import MemlmLM
from memlm.language_model import LanguageModel, load
from memlm.server.http.answers import ChoiceAnswer
from memlm.server.http.openai import AnswerForm

TASK = """
task: own_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list:
  - metric: acc
"""
WEB = ("--threads", "1", "--http-port", "0")
CHOICES = (" model can", " page", " a", " zq")
NUM_CONTEXTS = 5


# Of what the harness imports, and of its sockets.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture(scope="module")
def plain_lm(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Iterator[LanguageModel]:
    """A model that reads a prompt without a start token, as most do, with several special tokens."""
    folder = save_chat_model(tmp_path_factory.mktemp("models") / "plain", tokenizer)
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 300, "eos_token_id": tokenizer.end_id}))
    with load(folder) as lm:
        yield lm


@pytest.fixture(scope="module")
def plain_web(tmp_path_factory: pytest.TempPathFactory, plain_lm: LanguageModel) -> Iterator[RunningServer]:
    with RunningServer(tmp_path_factory.mktemp("log") / "log", plain_lm.checkpoint.path, options=WEB) as server:
        yield server


def examples(lm: LanguageModel) -> dict[str, str]:
    """Contexts, and the text of the token that the model draws after each."""
    found = dict[str, str]()
    for seed in range(400):
        context = make_text(seed, 4).strip()
        drawn = lm.generate(context, temperature=0, max_tokens=1, loop_guard=False).result()
        ids = [token.id for token in drawn.tokens]
        if ids and lm.tokenize(context + drawn.text) == [*lm.tokenize(context), *ids]:
            found[context] = drawn.text
        if len(found) == NUM_CONTEXTS:
            break
    return found


def found(model: Any, lm: LanguageModel, folder: Path) -> list[tuple[float, bool]]:
    """The log-likelihood of every choice, and whether it is the greedy one."""
    lines = [json.dumps({"context": context, "choices": [*CHOICES, drawn]}) for context, drawn in examples(lm).items()]
    (folder / "texts.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "own.yaml").write_text(TASK.format(file=folder / "texts.jsonl"))
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    done = simple_evaluate(model=model, tasks=["own_choice"], task_manager=tasks, bootstrap_iters=0)
    answers = [tuple(each) for sample in done["samples"]["own_choice"] for each in sample["filtered_resps"]]
    assert len(answers) == NUM_CONTEXTS * (len(CHOICES) + 1)
    return answers


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


def client_of(server: RunningServer, name: str, **options: Any) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(f"{server.http_url}/v1/completions", model=name, **options)


def assert_alike(ours: list[tuple[float, bool]], theirs: list[tuple[float, bool]]) -> None:
    assert [logprob for logprob, _ in theirs] == pytest.approx([logprob for logprob, _ in ours], abs=1e-4)
    assert [is_greedy for _, is_greedy in theirs] == [is_greedy for _, is_greedy in ours]


@pytest.mark.parametrize("options", [{}, {"batch_size": 4}, {"num_concurrent": 3}], ids=str)
def test_token_ids_have_the_likelihoods_of_the_model(
    plain_web: RunningServer, plain_lm: LanguageModel, tmp_path: Path, options: dict[str, Any]
) -> None:
    theirs = client_of(plain_web, "plain", max_length=400, **options)
    assert theirs.tokenizer_backend == "remote"  # found by itself, from /tokenizer_info
    ours = found(MemlmLM(plain_lm), plain_lm, tmp_path)
    assert sum(is_greedy for _, is_greedy in ours) == NUM_CONTEXTS
    assert_alike(ours, found(theirs, plain_lm, tmp_path))


def test_texts_have_the_likelihoods_of_the_mixture(web: RunningServer, lm: LanguageModel, tmp_path: Path) -> None:
    """A text is read as a document, after the start token, so that its keys are those of the datastore."""
    theirs = client_of(web, "tiny", max_length=48, tokenized_requests=False)
    ours = found(MemlmLM(lm), lm, tmp_path)
    assert sum(is_greedy for _, is_greedy in ours) >= NUM_CONTEXTS
    assert_alike(ours, found(theirs, lm, tmp_path))


def test_the_tokenizer_of_the_server_is_that_of_the_model(plain_web: RunningServer, plain_lm: LanguageModel) -> None:
    theirs, end_id = RemoteTokenizer(plain_web.http_url), plain_lm.tokenizer.end_id
    assert (theirs.eos_token, theirs.bos_token) == ("<|endoftext|>", "<|im_start|>")
    assert (theirs.eos_token_id, theirs.bos_token_id) == (end_id, 300)
    for text in (" a page", "<|im_start|> a", " <|im_start|>"):  # of text, not of special tokens
        assert theirs.encode(text) == plain_lm.tokenize(text)
    assert theirs.batch_decode([[*plain_lm.tokenize(" a page")]]) == [" a page"]
    info = theirs.tokenizer_info
    assert (info["chat_template"], info["add_bos_token"]) == (CHATML, False)
    assert (info["unk_token"], info["pad_token"]) == (None, None)
    assert info["additional_special_tokens"] == ["<|im_end|>"]
    contents = {int(number): token["content"] for number, token in info["added_tokens_decoder"].items()}
    assert contents == {end_id: "<|endoftext|>", 300: "<|im_start|>", 301: "<|im_end|>"}
    assert (info["vocab_size"], info["model_max_length"]) == (302, 400)


def test_a_start_token_that_prompts_get_is_told(web: RunningServer) -> None:
    info = RemoteTokenizer(web.http_url).tokenizer_info
    assert (info["chat_template"], info["add_bos_token"]) == (PLAIN, True)
    assert info["additional_special_tokens"] == []


def test_a_text_is_generated_up_to_a_stop_string(plain_web: RunningServer, plain_lm: LanguageModel) -> None:
    theirs = client_of(plain_web, "plain", max_length=400)
    options = {"until": [" a"], "max_gen_toks": 12, "do_sample": False}
    contexts = list(examples(plain_lm))
    requests = [Instance("generate_until", {}, (context, options), 0) for context in contexts]
    ours = MemlmLM(plain_lm).generate_until(requests, disable_tqdm=True)
    assert theirs.generate_until(requests, disable_tqdm=True) == ours


def test_a_text_that_the_model_ends_has_an_entry_for_the_end() -> None:
    """The harness asks for one token after the text, and drops the last entry, also where the model draws an end."""
    for echo, wanted in ((True, ["a", "b", ""]), (False, [])):
        answer = ChoiceAnswer(0, AnswerForm("tiny", is_chat=False, num_logprobs=1))
        if echo:
            answer.add_echo("ab", [TokenScore(each, chr(each), -1.0, -1.0) for each in (97, 98)], None)
        answer.add_finished(Finished(FinishReason.END, None, Usage()))
        assert answer.logprobs is not None
        assert answer.logprobs["tokens"] == wanted
        assert [len(each) for each in answer.logprobs.values()] == [len(wanted)] * 4
