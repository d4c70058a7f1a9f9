"""Vectors and rankings come from the cross-encoder, the encoder or the model, whichever is there, and say so. What does
not fit is refused by name before a model reads it.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import save_bert, save_cross_encoder

import memlm.api.embeddings as api
import memlm.generation.embedding as embedding
from memlm.api.embeddings import (
    MAX_CHARACTERS,
    MAX_INPUTS,
    MAX_READ_TOKENS,
    Embeddings,
    EmbedRequest,
    RelevanceBy,
    RerankRequest,
)
from memlm.base.steps import Offload, Steps, run_steps
from memlm.errors import Corrupt, InvalidInput
from memlm.language_model import LanguageModel, load
from memlm.model.files.encoder_files import LazyEncoder, load_encoder

TEXTS = ["the memory of the page", "of", "the page of the model and more"]
QUERY = "the page of the memory"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert("no head", tmp_path_factory.mktemp("encoders") / "small-bert")


@pytest.fixture(scope="module")
def cross(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_cross_encoder("bert", tmp_path_factory.mktemp("encoders") / "small-cross")


@pytest.fixture(scope="module")
def with_encoder(model_folder: Path, bert: Path) -> Iterator[LanguageModel]:
    with load(model_folder, passage_encoder=bert) as lm:
        yield lm


@pytest.fixture(scope="module")
def alone(model_folder: Path) -> Iterator[LanguageModel]:
    with load(model_folder, passage_encoder=None) as lm:
        yield lm


def test_vectors_are_those_of_the_encoder(with_encoder: LanguageModel, bert: Path) -> None:
    encoder = load_encoder(bert)
    answer = with_encoder.embed(TEXTS)
    assert answer.vectors.tobytes() == encoder.vectors(TEXTS).tobytes()
    ids = encoder.tokenizer.encode(TEXTS)
    assert (answer.model, answer.dim, len(answer)) == ("small-bert", 48, 3)
    assert answer.num_tokens == sum(map(len, ids))
    assert with_encoder.embed(ids).data == answer.data
    assert with_encoder.embed(TEXTS[0]).data == answer.data[: 4 * 48]
    assert (with_encoder.info.encoder, with_encoder.info.reranker) == ("small-bert", None)


def test_vectors_of_a_model_are_the_means_of_its_keys(alone: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = alone.checkpoint
    answer, start = alone.embed(TEXTS), checkpoint.tokenizer.start_id
    for place, text in enumerate(TEXTS):
        ids = checkpoint.tokenizer.encode(text).tolist()
        with torch.inference_mode():
            expected = checkpoint.decoder.keys(torch.tensor([[start, *ids]]))[0, 1:].float().mean(dim=0)
        np.testing.assert_allclose(answer.vectors[place], expected / expected.norm(), atol=1e-5)
        assert alone.embed([ids]).data == alone.embed([[start, *ids]]).data == alone.embed(text).data
    assert (answer.model, answer.dim) == (checkpoint.path.name, checkpoint.decoder.config.dim)
    assert alone.info.encoder is None
    monkeypatch.setattr(embedding, "PIECE_TOKENS", 2)
    np.testing.assert_allclose(alone.embed(TEXTS).vectors, answer.vectors, atol=1e-5)


@pytest.mark.parametrize("which", ["with_encoder", "alone"])
def test_fewer_dimensions_are_the_first_ones_at_length_one(which: str, request: pytest.FixtureRequest) -> None:
    lm = request.getfixturevalue(which)
    whole, some = lm.embed(TEXTS).vectors, lm.embed(TEXTS, dimensions=5).vectors
    np.testing.assert_allclose(some, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1, keepdims=True), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(some, axis=1), 1, atol=1e-6)
    assert lm.embed(TEXTS, dimensions=whole.shape[1]).data == lm.embed(TEXTS).data
    for dimensions in (0, -1, whole.shape[1] + 1, 2.5, float("nan")):
        with pytest.raises(InvalidInput) as raised:
            lm.embed(TEXTS, dimensions=dimensions)
        assert raised.value.field == "dimensions"


@pytest.mark.parametrize("which", ["with_encoder", "alone"])
def test_a_text_that_is_too_long_is_refused_or_cut(which: str, request: pytest.FixtureRequest) -> None:
    lm, long = request.getfixturevalue(which), "the page of the model " * 500
    with pytest.raises(InvalidInput, match=r"text 1 has .* tokens.*truncate") as raised:
        lm.embed(["the page", long])
    assert raised.value.field == "texts"
    cut = lm.embed(["the page", long], truncate=True)
    most = lm.checkpoint.decoder.config.max_length - 1 if which == "alone" else 64
    assert cut.num_tokens == lm.embed("the page").num_tokens + most
    assert cut.data[4 * cut.dim :] == lm.embed(long + "and more", truncate=True).data


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        ([], "at least one"),
        ("", "empty"),
        (["a", ""], "text 1 of texts is empty"),
        ([[1, 2], []], "no token ids"),
        ([[1, 2], [3, 299, 300]], "299, outside the vocabulary"),
        ([[-1]], "-1, outside the vocabulary"),
        (["a\0b"], "NUL"),
        (["\ud800"], "surrogate"),
        (["a", [1]], "expected a text, or token ids"),
        ([1.5], "expected texts"),
        (7, "expected texts"),
        (["a"] * (MAX_INPUTS + 1), "2,049; at most 2,048"),
        (["a" * MAX_CHARACTERS, "a"], "4,194,305 characters"),
        ([[1] * (MAX_READ_TOKENS + 1)], "300,001 tokens"),
    ],
)
def test_texts_that_cannot_be_read_are_refused_by_name(with_encoder: LanguageModel, texts: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=says) as raised:
        with_encoder.embed(texts)
    assert raised.value.field in ("texts", "token_ids")


def test_too_many_tokens_are_refused_before_a_model_reads_any(alone: LanguageModel, monkeypatch) -> None:
    monkeypatch.setattr(embedding, "passes", None)
    monkeypatch.setattr(api, "MAX_READ_TOKENS", 20)
    for ask in (lambda: alone.embed(TEXTS), lambda: alone.rerank(QUERY, TEXTS)):
        with pytest.raises(InvalidInput, match="at most 20 in one call"):
            ask()
    monkeypatch.setattr(embedding, "MAX_NUMBERS", 90)
    with pytest.raises(InvalidInput, match="more than the 90 of an answer"):
        alone.embed(TEXTS)


def test_damaged_weights_are_named(with_encoder: LanguageModel, bert: Path, monkeypatch) -> None:
    damaged = load_encoder(bert)
    with torch.no_grad():
        damaged.encoder.embedding_norm.bias.fill_(float("nan"))
    monkeypatch.setattr(with_encoder.engine, "passage_encoder", damaged)
    for ask in (lambda: with_encoder.embed(TEXTS), lambda: with_encoder.rerank(QUERY, TEXTS)):
        with pytest.raises(Corrupt, match="small-bert is not finite"):
            ask()


def test_an_encoder_reads_outside_the_loop_in_bounded_pieces(with_encoder: LanguageModel, bert: Path) -> None:
    """Each piece of work has few texts, so that a request that is cancelled ends soon. A lazy encoder is loaded there
    too.
    """
    lazy = LazyEncoder(bert, "float32")
    texts, sizes = ["the page of the model and the memory"] * 300, list[int]()
    steps = embedding.embed(with_encoder.checkpoint, lazy, EmbedRequest(tuple(texts)))

    def recorded() -> Steps[Embeddings]:
        work = next(steps)
        assert "_loaded" not in vars(lazy)
        while True:
            assert isinstance(work, Offload)
            assert (work.is_long, work.must_end) == (True, False)
            done = yield work
            sizes.append(len(done) if isinstance(done, np.ndarray) else 0)
            try:
                work = steps.send(done)
            except StopIteration as end:
                return end.value

    assert run_steps(recorded()).data == with_encoder.embed(texts).data
    assert sum(sizes) == 300
    assert max(sizes) < 150


def test_documents_are_ranked_by_the_cosine_of_the_encoder(with_encoder: LanguageModel, bert: Path) -> None:
    query_D, *vectors = load_encoder(bert).vectors([QUERY, *TEXTS])
    cosines = [float(vector @ query_D) for vector in vectors]
    ranking = with_encoder.rerank(QUERY, TEXTS)
    assert (ranking.by, ranking.model) == (RelevanceBy.ENCODER, "small-bert")
    assert [each.index for each in ranking.documents] == sorted(range(3), key=lambda place: -cosines[place])
    assert [each.score for each in ranking.documents] == pytest.approx(sorted(cosines, reverse=True), abs=1e-6)
    assert with_encoder.rerank(QUERY, TEXTS, top_n=2).documents == ranking.documents[:2]
    assert with_encoder.rerank(QUERY, TEXTS, top_n=9).documents == ranking.documents


def test_documents_are_ranked_by_the_cross_encoder_where_there_is_one(model_folder: Path, cross: Path) -> None:
    with load(model_folder, passage_encoder=None, reranker=cross) as lm:
        checkpoint, documents = lm.engine.reranker, [*TEXTS, "", "the page of the model " * 500]
        ranking, pairs = lm.rerank(QUERY, documents), checkpoint.encode(QUERY, documents)
        assert (ranking.by, ranking.model, lm.info.reranker) == ("cross_encoder", "small-cross", "small-cross")
        scores = checkpoint.scores(pairs)
        assert [each.index for each in ranking.documents] == np.argsort(-scores).tolist()
        assert {each.index: each.score for each in ranking.documents} == dict(enumerate(map(float, scores)))
        assert ranking.num_tokens == sum(len(ids) for ids, _ in pairs)


def test_documents_are_ranked_by_the_model_where_there_is_nothing_else(alone: LanguageModel, monkeypatch) -> None:
    """By the mean probability of the query behind the document, as `loglikelihood` has it."""
    tokenizer = alone.checkpoint.tokenizer
    expected = []
    for text in (*TEXTS, ""):
        ids, query = tokenizer.encode(f"{text}\n").tolist(), tokenizer.encode(QUERY).tolist()
        logprobs = [
            each.lm_logprob for each in alone.score([tokenizer.start_id, *ids, *query], token_scores=True).token_scores
        ]
        expected.append(np.exp(np.mean(logprobs[-len(query) :])))
    for piece in (256, 3, 1):
        monkeypatch.setattr(embedding, "PIECE_TOKENS", piece)
        ranking = alone.rerank(QUERY, [*TEXTS, ""])
        assert (ranking.by, ranking.model) == (RelevanceBy.MODEL, alone.checkpoint.path.name)
        assert [each.index for each in ranking.documents] == np.argsort(-np.array(expected)).tolist()
        for each in ranking.documents:
            assert each.score == pytest.approx(expected[each.index], rel=1e-4)


def test_the_begin_of_a_long_document_counts(alone: LanguageModel, with_encoder: LanguageModel) -> None:
    for lm in (alone, with_encoder):
        first, second = lm.rerank(QUERY, ["the page of the model " * 500, "the page of the model " * 900]).documents
        assert first.score == pytest.approx(second.score, rel=1e-6)
        assert first.index == 0  # equal ones keep their order


@pytest.mark.parametrize(
    ("query", "documents", "top_n", "field"),
    [
        ("", TEXTS, None, "query"),
        (" \n", TEXTS, None, "query"),
        (5, TEXTS, None, "query"),
        ("\ud800", TEXTS, None, "query"),
        (QUERY, [], None, "documents"),
        (QUERY, "the page", None, "documents"),
        (QUERY, [5], None, "documents"),
        (QUERY, ["a"] * 10_000, None, "documents"),
        (QUERY, ["a" * MAX_CHARACTERS], None, "documents"),
        (QUERY, TEXTS, 0, "top_n"),
        (QUERY, TEXTS, float("nan"), "top_n"),
        ("the page " * 400, TEXTS, None, "query"),
    ],
)
def test_rankings_that_cannot_be_made_are_refused_by_name(alone, query, documents, top_n, field: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        alone.rerank(query, documents, top_n=top_n)
    assert raised.value.field == field


def test_requests_take_either_texts_or_ids() -> None:
    for fields in ({}, {"texts": ("a",), "token_ids": ((1,),)}):
        with pytest.raises(InvalidInput, match="texts or token_ids"):
            EmbedRequest(**fields)
    with pytest.raises(InvalidInput, match="tuple"):
        RerankRequest("a", ["b"])
