"""The store of RETRO's neighbors, against a search that looks at every chunk of every document."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from decoders import SHAPE, make

from memlm.errors import InvalidInput
from memlm.model import Decoder
from memlm.zoo.retro import chunk_store
from memlm.zoo.retro.chunk_store import ChunkStore, TokenMeans
from memlm.zoo.retro.encoder import NOTHING

CHUNK, LENGTH = 4, 7


def documents(seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(40, size=size).tolist() for size in (9, 0, 30, 3, 17, 12)]


def slowly(documents, embed, asked, count, leaves_out_own):
    """Texts of the nearest chunks, one chunk and document at a time."""
    candidates = []
    for text in documents:
        runs = [text[place : place + CHUNK - 1] for place in range(len(text))]
        has_it = asked[1:] in runs or asked[:-1] in runs
        for begin in range(0, len(text), CHUNK):
            own = text[begin : begin + CHUNK]
            vectors = [embed(np.array([each]))[0] for each in (own, asked)]
            if not (leaves_out_own and has_it):
                candidates.append((((vectors[0] - vectors[1]) ** 2).sum(), text[begin : begin + LENGTH]))
    return [text for _, text in sorted(candidates, key=lambda each: each[0])[:count]]


@pytest.mark.parametrize("leaves_out_own", [False, True])
@pytest.mark.parametrize("count", [3, 50])
def test_it_finds_what_a_search_of_every_chunk_finds(leaves_out_own, count):
    texts, embed = documents(), TokenMeans(make(SHAPE))
    store = ChunkStore(texts, embed, chunk=CHUNK, neighbors=count, length=LENGTH, leaves_out_own=leaves_out_own)
    asked = [texts[2][5:9], texts[4][8:12], [1, 2, 3, 4]]
    found = store(torch.tensor(asked))
    assert found.shape == (3, count, LENGTH)
    for chunk, found_kr in zip(asked, found.tolist(), strict=True):
        expected = slowly(texts, embed, chunk, count, leaves_out_own)
        padded = [[*text, *[NOTHING] * (LENGTH - len(text))] for text in expected]
        assert found_kr == padded + [[NOTHING] * LENGTH] * (count - len(expected))


def test_no_neighbor_is_of_a_document_that_has_the_chunk_at_any_place():
    texts = documents()
    texts.append(texts[2][3:20])  # a copy within another document
    store = ChunkStore(texts, TokenMeans(make(SHAPE)), chunk=CHUNK, neighbors=2, length=CHUNK, leaves_out_own=True)
    own = {tuple(text[place : place + CHUNK]) for text in (texts[2], texts[-1]) for place in range(len(text))}
    for begin in range(3, 16):
        found = store(torch.tensor([texts[2][begin : begin + CHUNK]]))[0].tolist()
        assert not {tuple(token for token in text if token != NOTHING) for text in found} & own


def test_it_looks_on_where_the_nearest_chunks_are_all_left_out():
    texts, embed, asked = [[1, 2, 3, 4] * 30, *documents()], TokenMeans(make(SHAPE)), [1, 2, 3, 4]
    store = ChunkStore(texts, embed, chunk=CHUNK, neighbors=2, length=CHUNK, leaves_out_own=True)
    expected = [text[:CHUNK] for text in slowly(texts, embed, asked, 2, True)]
    assert store(torch.tensor([asked]))[0].tolist() == expected


def test_learning_changes_no_distance():
    decoder = Decoder(SHAPE)
    store = ChunkStore(documents(), TokenMeans(decoder), chunk=CHUNK)
    asked = torch.tensor([[1, 2, 3, 4]])
    before = store(asked)
    with torch.no_grad():
        decoder.embedding.weight.normal_()
    assert torch.equal(store(asked), before)


def test_documents_without_tokens_are_refused():
    with pytest.raises(InvalidInput, match="no tokens"):
        ChunkStore([[], []], TokenMeans(make(SHAPE)))


def test_the_first_chunk_of_a_model_finds_no_text_of_its_own():
    generator, start = np.random.default_rng(0), 99
    texts = [generator.integers(90, size=60).tolist() for _ in range(8)]
    store = ChunkStore(
        texts, TokenMeans(make(replace(SHAPE, vocab_size=100))), chunk=8, neighbors=1, leaves_out_own=True
    )
    for text in texts:
        ((found,),) = store(torch.tensor([[start, *text[:7]]])).tolist()
        assert found[:8] not in [text[place : place + 8] for place in range(0, 60, 8)]


def test_embeddings_are_made_in_parts(monkeypatch):
    monkeypatch.setattr(chunk_store, "EMBEDDED", 2)
    sizes, embed = [], TokenMeans(make(SHAPE))
    store = ChunkStore(documents(), lambda chunks: (sizes.append(len(chunks)), embed(chunks))[1], chunk=CHUNK)
    monkeypatch.undo()
    asked = torch.tensor([documents()[2][4:8]])
    assert max(sizes) == 2
    assert torch.equal(store(asked), ChunkStore(documents(), embed, chunk=CHUNK)(asked))


def test_chunks_and_lengths_that_do_not_fit_are_refused():
    embed = TokenMeans(make(SHAPE))
    with pytest.raises(InvalidInput, match="have 5 tokens"):
        ChunkStore(documents(), embed, chunk=CHUNK)(torch.zeros(1, 5, dtype=torch.int64))
    with pytest.raises(InvalidInput, match="length"):
        ChunkStore(documents(), embed, chunk=CHUNK, length=-3)
