"""A text's own past as a memory: generation and scoring agree on it, in sessions, batches and with drafts."""

import shutil
from pathlib import Path

import pytest
import torch
from texts import make_text

from memlm.api.scoring import ScoreRequest
from memlm.base.steps import run_steps
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.generation.sessions.sessions import Sessions
from memlm.indexing.tune_context import tune_context
from memlm.language_model import LanguageModel
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval.adaptive import AdaptiveLam
from memlm.retrieval.own_past import SETTINGS_FILE, ContextSettings

PROMPT = "the memory the memory the mem"
OPTIONS = {"temperature": 0, "max_tokens": 14}
SETTINGS = {
    "one λ": ContextSettings(k=4, temperature=20.0, lam=0.4),
    "adaptive": ContextSettings(
        k=6, temperature=20.0, lam=0.4, adaptive=AdaptiveLam(0.2, (-0.1, 0.2, 0.3, 0.1, 0.2), (0.0,) * 5, (1.0,) * 5)
    ),
}


@pytest.fixture(scope="module", params=sorted(SETTINGS))
def tuned(request, model_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tuned") / "model"
    shutil.copytree(model_folder, folder)
    SETTINGS[request.param].save(folder)
    return folder


@pytest.fixture
def model(tuned) -> LanguageModel:
    return LanguageModel(load_checkpoint(tuned))


def logprobs(tokens):
    return [token.logprob for token in tokens]


@pytest.mark.parametrize("stores", [0, 1])
@pytest.mark.parametrize("options", [{}, {"context_cache": 5}, {"context_cache": 0}])
def test_a_generated_text_has_the_log_probabilities_of_its_score(tuned, store_folder, stores, options):
    with LanguageModel(load_checkpoint(tuned), [store_folder] * stores) as model:
        tokens = model.generate(PROMPT, **OPTIONS, loop_guard=False, **options).result().tokens
        ids = [*model.tokenizer.framed(model.tokenize(PROMPT), as_document=True), *(token.id for token in tokens)]
        request = ScoreRequest.of(ids, options, token_scores=True)
        scored = run_steps(model.engine.score(request)).token_scores[-len(tokens) :]
        assert [each.id for each in scored] == [token.id for token in tokens]
        assert logprobs(tokens) == pytest.approx(logprobs(scored), abs=1e-4)
        past_speaks = options.get("context_cache") != 0
        assert (tokens[-1].knn_logprob is None) == (not past_speaks and not stores)
        assert (tokens[-1].lam > 0) == (past_speaks or bool(stores))


def test_the_past_changes_the_text_and_its_share_is_told(model):
    with_past = model.generate(PROMPT, **OPTIONS, neighbors=3, loop_guard=False).result()
    alone = model.generate(PROMPT, **OPTIONS, context_cache=0).result()
    assert logprobs(with_past.tokens) != logprobs(alone.tokens)
    assert model.generate(PROMPT, **OPTIONS, use_store=False).result().tokens == alone.tokens
    text_ids = [*model.tokenize(PROMPT), *(token.id for token in with_past.tokens)]
    for number, token in enumerate(with_past.tokens):
        assert token.neighbors
        for neighbor in token.neighbors:
            assert (neighbor.store, neighbor.document_id) == ("context", "this text")
            assert text_ids[neighbor.token_offset] == neighbor.token_id
            assert neighbor.token_offset < len(model.tokenize(PROMPT)) + number
            assert neighbor.char_offset == len(model.tokenizer.decode(text_ids[: neighbor.token_offset]))


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_drafts_change_nothing(model, temperature):
    options = {**OPTIONS, "temperature": temperature, "seed": 3}
    plain = model.generate(PROMPT, drafts=0, **options).result()
    drafted = model.generate(PROMPT, drafts=6, draft=plain.text[:9] + " other", **options).result()
    assert [token.id for token in drafted.tokens] == [token.id for token in plain.tokens]
    assert logprobs(drafted.tokens) == pytest.approx(logprobs(plain.tokens), abs=1e-5)
    assert any(source.accepted for source in drafted.finished.usage.drafts)


def test_a_batch_gives_each_text_its_own_past(model):
    prompts = [PROMPT, "of a model", "read and read and"]
    alone = [model.generate(prompt, **OPTIONS).result() for prompt in prompts]
    together = model.generate_batch(prompts, **OPTIONS)
    for one, other in zip(alone, together, strict=True):
        assert one.text == other.text
        assert logprobs(one.tokens) == pytest.approx(logprobs(other.tokens), abs=1e-4)


def test_a_session_goes_on_with_its_past(model):
    ids = model.tokenize(PROMPT)
    with model.session() as session, model.session() as other:
        session.append(token_ids=ids[:7])
        session.append(token_ids=ids[7:])
        first = session.generate(temperature=0, max_tokens=5).result().tokens
        with session.fork() as fork:
            forked = list(fork.generate(temperature=0.9, seed=1, max_tokens=5))
            rest = session.generate(temperature=0, max_tokens=6).result().tokens
            assert len(forked) == 5
        other.append(token_ids=ids)
        whole = other.generate(temperature=0, max_tokens=11).result().tokens
    assert [token.id for token in (*first, *rest)] == [token.id for token in whole]
    assert logprobs([*first, *rest]) == pytest.approx(logprobs(whole), abs=1e-4)


def test_a_request_that_was_broken_off_leaves_the_past_as_it_was(model):
    with model.session() as session, model.session() as other:
        for each in (session, other):
            each.append(token_ids=model.tokenize(PROMPT))
        stream = session.generate("and something else", temperature=0, max_tokens=9)
        next(stream)
        stream.close()
        one, two = (list(each.generate(temperature=0, max_tokens=6)) for each in (session, other))
    assert logprobs(one) == logprobs(two)


def test_a_request_without_the_past_keeps_it_for_later_ones(model):
    with model.session() as session, model.session() as other:
        for each, options in ((session, {"context_cache": 0}), (other, {})):
            each.append(token_ids=model.tokenize(PROMPT))
            list(each.generate(" and", temperature=0, max_tokens=1, stop=[], **options))
        one, two = (list(each.generate(" the", temperature=0, max_tokens=6)) for each in (session, other))
    if [token.id for token in one] == [token.id for token in two]:  # the first tokens were the same
        assert logprobs(one) == pytest.approx(logprobs(two), abs=1e-4)


def test_a_session_on_the_disk_has_its_past(tuned, tmp_path):
    checkpoint = load_checkpoint(tuned)
    model = LanguageModel(checkpoint, sessions=Sessions(checkpoint, folder=tmp_path))
    session = model.session()
    session.append(token_ids=model.tokenize(PROMPT))
    (kept,) = model.engine.sessions._sessions.values()
    restarted = LanguageModel(checkpoint, sessions=Sessions(checkpoint, folder=tmp_path))
    (restored,) = restarted.engine.sessions._sessions.values()
    assert restored.state.past is not None
    assert restored.state.past_size == kept.state.past_size == kept.state.num_read
    for name in ("_keys_ND", "_norms_N"):
        one, two = (getattr(each.state.past, name)[: kept.state.past_size] for each in (kept, restored))
        assert one.tobytes() == two.tobytes()
    one, two = (list(each.generate("", session=kept.name, temperature=0, max_tokens=8)) for each in (model, restarted))
    assert one == two


def test_the_ram_of_sessions_is_counted_in_and_out(model, monkeypatch):
    monkeypatch.setattr("memlm.retrieval.context_cache.ROWS", 4)  # so that the past of a short text grows
    sessions = model.engine.sessions
    with model.session() as session:
        session.append(token_ids=model.tokenize(PROMPT))
        kept = sessions.num_bytes
        stream = session.generate(" and", temperature=0, max_tokens=20)
        for _ in range(15):
            next(stream)
        stream.close()
        assert sessions.num_bytes == kept
        (one,) = sessions._sessions.values()
        assert kept == one.num_bytes > one.state.past.num_bytes(0)
        list(session.generate(temperature=0, max_tokens=4))
        with session.fork():
            assert sessions.num_bytes == sum(each.num_bytes for each in sessions._sessions.values())
    assert sessions.num_bytes == 0


def test_a_model_that_was_not_tuned_refuses_a_number(lm):
    with pytest.raises(InvalidInput, match="memlm tune"):
        lm.generate("a", context_cache=100)


def test_tuning_saves_what_helps_and_nothing_else(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    for number in range(6):
        sentence = make_text(number, 12)
        (tmp_path / f"{number}.txt").write_text(f"{sentence} " * 8)
    tuning = tune_context(folder, Corpus([tmp_path], "*.txt"), max_tokens=4000)
    assert tuning.kept
    assert tuning.nats < tuning.base_nats - 0.5
    assert ContextSettings.load(folder) == tuning.settings
    (folder / SETTINGS_FILE).unlink()
    with pytest.raises(InvalidInput, match="the documents to tune on are"):
        tune_context(folder, Corpus([tmp_path / "0.txt"]))
    assert not (folder / SETTINGS_FILE).exists()


def test_texts_without_a_distance_between_their_keys_can_be_tuned_on(model_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("the memory of a model " * 20)
    checkpoint = load_checkpoint(folder)
    with torch.no_grad():
        for parameter in checkpoint.decoder.parameters():
            parameter.zero_()
    assert tune_context(checkpoint, Corpus([tmp_path], "*.txt"), max_tokens=5000).settings.temperature > 0
