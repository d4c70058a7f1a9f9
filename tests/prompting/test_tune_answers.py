"""How questions are asked is chosen on half of the documents, and saved where it gains on the other half."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from chats import PLAIN, PLAIN_TOKENS, give_template
from conftest import SHAPE
from texts import make_text

from memlm.api.chat import Message
from memlm.cli.tune import _print_answers
from memlm.data.corpus import Document
from memlm.errors import Corrupt, InvalidInput
from memlm.generation.answer_settings import SETTINGS_FILE, AnswerSettings
from memlm.indexing.build import build_index
from memlm.language_model import LanguageModel, load
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.prompting.tune_answers import TOKENS, Question, contains, read_questions, tune_answers

DEFAULT, OTHER = AnswerSettings(1, points_out=True), AnswerSettings(2, points_out=False)


@pytest.fixture(scope="module")
def made(tokenizer, tmp_path_factory) -> Path:
    """A model with room for several passages, and a datastore of 16 documents."""
    folder = tmp_path_factory.mktemp("asked")
    torch.manual_seed(3)
    decoder = Decoder(ModelConfig(vocab_size=tokenizer.vocab_size, **{**SHAPE, "context_length": 1024}))
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)  # so that answers have many words
    save_checkpoint(folder / "model", decoder, tokenizer)
    give_template(folder / "model", PLAIN, PLAIN_TOKENS)
    documents = [Document(f"{n:02}", f"{n:02}", f"Page number{n}. {make_text(n, 20)}") for n in range(16)]
    build_index(folder / "model", documents, folder / "store", keys="none")
    return folder


@pytest.fixture
def asked(made, tmp_path) -> Path:
    shutil.copytree(made, tmp_path / "asked")
    return tmp_path / "asked"


def answered(lm: LanguageModel, text: str, settings: AnswerSettings) -> str:
    lm.engine.ask_by(settings)
    found = lm.find_passages(text, k=8)
    return lm.answer(text, found[: settings.num_passages], temperature=0, max_tokens=TOKENS).text


def questions(folder: Path, right_way: Callable[[int], AnswerSettings]) -> list[Question]:
    """Questions about each document, of which the answer by one way, and by no other, is right."""
    with load(folder / "model", [folder / "store"], passage_encoder=None) as lm:
        texts = [f"page number{n}" for n in range(16)]
        return [Question(text, (answered(lm, text, right_way(n)),)) for n, text in enumerate(texts)]


def tuned(folder: Path, asked: Sequence[Question]):
    with load(folder / "model", [folder / "store"], passage_encoder=None) as lm:
        tuning = tune_answers(lm.engine, asked, label="mine")
        assert lm.engine.answers == AnswerSettings.of(lm.checkpoint)
        return tuning


def test_the_way_that_answers_rightly_is_saved_with_the_model_and_answers_from_then_on(asked, capsys):
    tuning = tuned(asked, questions(asked, lambda number: OTHER))
    assert tuning.kept
    assert (tuning.questions, tuning.documents) == (16, 16)
    _print_answers(tuning, Path("mine"))
    assert "Saved with mine: 2 passages, +" in " ".join(capsys.readouterr().out.split())
    assert (tuning.chosen.num_passages, tuning.chosen.points_out) == (2, False)
    best = next(way for way in tuning.ways if way.settings == OTHER)
    assert (best.right, best.right_elsewhere) == (1.0, 1.0)
    assert tuning.ways[0].settings == DEFAULT
    assert tuning.chosen.gain == pytest.approx(1 - tuning.ways[0].right_elsewhere)
    with load(asked / "model", [asked / "store"], passage_encoder=None) as lm:
        assert lm.engine.answers == tuning.chosen
        assert len(lm.answer("page number3", max_tokens=2).passages) == 2
        chat = lm.chat([Message("user", "page number3")], max_tokens=2)
        assert len(chat.accepted.prompt.passages) == 2


def test_the_defaults_stay_where_they_answer_best(asked):
    tuning = tuned(asked, questions(asked, lambda number: DEFAULT))
    assert not tuning.kept
    assert (tuning.chosen.gain, tuning.ways[0].right) == (0, 1)
    assert not (asked / "model" / SETTINGS_FILE).exists()


def test_a_way_that_is_best_on_the_documents_it_was_chosen_on_alone_is_not_saved(asked):
    tuning = tuned(asked, questions(asked, lambda number: DEFAULT if number % 2 else OTHER))
    assert (tuning.chosen.num_passages, tuning.kept) == (2, False)
    assert tuning.chosen.gain < 0
    assert not (asked / "model" / SETTINGS_FILE).exists()


def test_questions_about_few_documents_are_refused_and_settings_stay(asked):
    with load(asked / "model", [asked / "store"], passage_encoder=None) as lm:
        with pytest.raises(InvalidInput, match="1 documents; give questions about 8"):
            tune_answers(lm.engine, [Question("page number3", ("a",))] * 2, label="mine")
        assert lm.engine.answers == DEFAULT


def test_a_way_that_gains_no_more_leaves_the_model_to_its_defaults(asked, capsys):
    asked_by_default = questions(asked, lambda number: DEFAULT)
    OTHER.save(asked / "model")
    tuning = tuned(asked, asked_by_default)
    assert (tuning.kept, tuning.chosen.num_passages) == (True, 1)
    _print_answers(tuning, Path("mine"))
    assert "saved with mine are removed" in " ".join(capsys.readouterr().out.split())
    assert not (asked / "model" / SETTINGS_FILE).exists()


def test_settings_that_no_trial_has_are_tried_too(asked):
    right = questions(asked, lambda number: DEFAULT)
    replace(OTHER, num_passages=3).save(asked / "model")
    assert [way.settings.num_passages for way in tuned(asked, right).ways] == [1, 1, 2, 4, 8, 3]


@pytest.mark.parametrize(
    "change",
    [{"num_passages": value} for value in (0, -1, True, None, 1.5, 10**30)]
    + [{"points_out": "no"}, {"gain": "x"}, {"gain": float("inf")}, {"tuned_on": [1]}],
    ids=str,
)
def test_settings_that_are_damaged_are_named(asked, change):
    (asked / "model" / SETTINGS_FILE).write_text(json.dumps({**asdict(DEFAULT), **change}))
    with pytest.raises(Corrupt, match="remove it, or run `memlm tune --answers`"):
        AnswerSettings.of(load_checkpoint(asked / "model"))


@pytest.mark.parametrize("text", ["{", "[]", "[" * 200_000, '{"num_passages": 1}'], ids=len)
def test_a_damaged_file_harms_questions_alone_until_it_is_tuned_again(asked, text):
    right = questions(asked, lambda number: OTHER)
    (asked / "model" / SETTINGS_FILE).write_text(text)
    with load(asked / "model", [asked / "store"], passage_encoder=None) as lm:
        assert lm.generate("a", max_tokens=2).result().tokens
        with pytest.raises(Corrupt, match="holds no settings"):
            lm.answer("page number3", max_tokens=2)
        assert tune_answers(lm.engine, right, label="mine").kept
        assert len(lm.answer("page number3", max_tokens=2).passages) == 2


def test_a_later_version_may_add_settings(asked):
    (asked / "model" / SETTINGS_FILE).write_text(json.dumps({**asdict(OTHER), "later": 1}))
    assert AnswerSettings.of(load_checkpoint(asked / "model")) == OTHER


def test_a_file_of_questions_has_one_in_each_line(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question": "a", "answers": ["b", "c"], "id": 1}\n\n{"question": "d", "answers": "e"}\n')
    assert read_questions(path) == [Question("a", ("b", "c")), Question("d", ("e",))]
    for line in (
        "a",
        "[]",
        '{"question": "a"}',
        '{"question": " ", "answers": ["a"]}',
        '{"question": "a", "answers": ["the."]}',
        "[" * 200_000,
        '{"question": 1, "answers": ["a"]}',
        '{"question": "a", "answers": []}',
    ):
        path.write_text('{"question": "a", "answers": ["b"]}\n' + line)
        with pytest.raises(InvalidInput, match="line 2: expected"):
            read_questions(path)
    path.write_text(json.dumps({})[:0])
    with pytest.raises(InvalidInput, match="has no questions"):
        read_questions(path)


def test_an_answer_is_right_by_its_words():
    assert contains("It was the Eiffel Tower, in 1889.", ["eiffel tower"])
    assert not contains("It was 18891.", ["1889"])
    assert not contains("", ["a tower"])
