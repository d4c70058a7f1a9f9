"""Cross parts: sources of rows, computed once and shared."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of

from memlm.data.corpus import Corpus, Document
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Incompatible, InvalidInput
from memlm.model import Decoder, DecoderState
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.model.state.pool import StatePool
from memlm.model.state.source import Source
from memlm.training.config import TrainConfig
from memlm.training.train import train
from memlm.zoo.shapes.source_attention import make_sources

PLAIN = replace(SHAPE, context_length=40, cross="source")
LENGTHS = [7, 3, 5]


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return make(PLAIN)


@pytest.fixture(scope="module")
def sources(decoder) -> list[Source]:
    return sources_of(decoder, LENGTHS)


def sources_of(decoder: Decoder, lengths: list[int], seed: int = 5) -> list[Source]:
    generator = torch.Generator().manual_seed(seed)
    states_BND = torch.randn(len(lengths), max(lengths), decoder.config.dim, generator=generator).double()
    with torch.inference_mode():
        return make_sources(decoder.blocks, states_BND, lengths)


def alone(decoder: Decoder, source: Source, tokens: list[int]) -> torch.Tensor:
    return logits(decoder, tokens, decoder.new_state(capacity=40, sources_B=[source]))


def test_rows_with_sources_of_unequal_lengths_read_as_if_they_were_alone(decoder, sources):
    rows = [tokens_of(11, seed) for seed in range(3)]
    state = decoder.new_state(batch_size=3, sources_B=sources)
    with torch.inference_mode():
        together = decoder.logits(decoder(torch.tensor(rows), state)[0])
    for got, source, row in zip(together, sources, rows, strict=True):
        torch.testing.assert_close(got, alone(decoder, source, row), atol=1e-12, rtol=0)


def test_a_changed_source_changes_the_logits_of_every_token(decoder, sources):
    tokens = tokens_of(11)
    change = (alone(decoder, sources[0], tokens) - alone(decoder, sources[1], tokens)).abs().amax(dim=1)
    assert change.min() > 1e-3


def test_forks_and_copies_share_the_source_and_not_its_numbers(decoder, sources):
    state = decoder.new_state(batch_size=3, capacity=20, sources_B=sources)
    with torch.inference_mode():
        decoder(torch.tensor([tokens_of(4)] * 3), state)
    pool = StatePool(decoder, most_rows=3, capacity=20)
    pool.add_row(state.extract_row(1), 0)
    for copied, row in ((state.fork(), 1), (state.extract_row(1), 0), (state.extract_start(1, 2), 0), (pool.state, 0)):
        assert copied.sources[row] is sources[1]
    twice = decoder.new_state(batch_size=2, sources_B=[sources[0]] * 2)
    assert twice.num_bytes - decoder.new_state(batch_size=2).num_bytes == sources[0].num_bytes
    pairs_L2BGNd, _ = twice.sources.joined()
    assert pairs_L2BGNd.data_ptr() == sources[0].pairs_L2GNd.data_ptr()


def test_rows_of_a_pool_keep_their_own_sources_when_others_leave(decoder, sources):
    pool, texts = StatePool(decoder, most_rows=3, capacity=40), [tokens_of(12, seed) for seed in range(3)]
    for source, text in zip(sources, texts, strict=True):
        state = decoder.new_state(capacity=40, sources_B=[source])
        logits(decoder, text[:5], state)
        pool.add_row(state)
    for place in (5, 6, 7):
        if place == 6:
            pool.remove_row(0)  # the last row takes its number
        numbers = [0, 1, 2] if place == 5 else [2, 1]
        with torch.inference_mode():
            got = decoder.logits(decoder(torch.tensor([[texts[n][place]] for n in numbers]), pool.state)[0])[:, 0]
        for row, number in enumerate(numbers):
            expected = alone(decoder, sources[number], texts[number])[place]
            torch.testing.assert_close(got[row], expected, atol=1e-12, rtol=0)


def test_a_saved_state_holds_the_sources_of_its_rows(decoder, sources):
    state = decoder.new_state(batch_size=3, capacity=20, sources_B=sources)
    back = DecoderState.restore(state.save(), decoder.config)
    for row, source in enumerate(sources):
        assert torch.equal(back.sources[row].pairs_L2GNd, source.pairs_L2GNd)


def test_a_reset_row_reads_its_source_again(decoder, sources):
    state, tokens = decoder.new_state(capacity=40, sources_B=sources[:1]), tokens_of(9)
    first = logits(decoder, tokens, state)
    state.reset(0)
    assert torch.equal(logits(decoder, tokens, state), first)


def test_rows_without_a_source_and_sources_that_do_not_fit_are_refused(decoder, sources):
    with pytest.raises(InvalidInput, match="row 0 has no source"):
        logits(decoder, tokens_of(3))
    partly = decoder.new_state(batch_size=2, sources_B=sources[:2])
    partly.sources[1] = None
    with pytest.raises(InvalidInput, match="row 1 has no source"), torch.inference_mode():
        decoder(torch.tensor([tokens_of(3)] * 2), partly)
    with pytest.raises(InvalidInput, match="3 sources for 2 rows"):
        decoder.new_state(batch_size=2, sources_B=sources)
    with pytest.raises(InvalidInput, match="reads no source"):
        make(replace(PLAIN, cross=None)).new_state(sources_B=sources[:1])
    for wrong in (sources[0].pairs_L2GNd[:1], sources[0].pairs_L2GNd[:, :, :, :0]):
        with pytest.raises(InvalidInput, match="source of row 0 is"):
            decoder.new_state(sources_B=[Source(wrong)])


@pytest.mark.parametrize("field", ["norm_order", "parallel_residual", "stack"])
def test_blocks_without_a_place_for_it_refuse_a_cross_part(field):
    change = {"norm_order": "post", "parallel_residual": True, "stack": "reversible"}[field]
    with pytest.raises(InvalidInput, match="cross none" if field == "stack" else "stands between"):
        replace(PLAIN, **{field: change})


def test_documents_have_no_source_to_train_with_and_prompts_none_to_read(tmp_path):
    corpus = Corpus([Document("a", "the page of the model and the memory " * 200)])
    with pytest.raises(InvalidInput, match="documents have none"):
        train(corpus, tmp_path / "out", TrainConfig(steps=1, model_fields={"cross": "source"}))
    save_checkpoint(tmp_path / "model", Decoder(PLAIN), Tokenizer.train(["a page"], vocab_size=257))
    with pytest.raises(Incompatible, match="reads a source"):
        load_checkpoint(tmp_path / "model")
