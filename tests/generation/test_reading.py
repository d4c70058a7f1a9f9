"""A model that remembers, through everything that reads documents: scoring, building, searching, generating."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from memlm.base.progress import Progress
from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.index.store.datastore import Datastore
from memlm.indexing.build import build_index, index_keys
from memlm.language_model import load
from memlm.model import Decoder, Memorizing, ModelConfig
from memlm.model.files.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from memlm.retrieval.encoder import Encoder, document_windows, score_tokens


class Killed(Exception):
    """Stands for a kill in the middle of a build."""


@pytest.fixture(scope="module")
def remembering(tmp_path_factory, tokenizer) -> Path:
    """A model with a Transformer-XL memory and a memorizing layer."""
    folder = tmp_path_factory.mktemp("models") / "remembering"
    torch.manual_seed(4)
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, ff_dim=48,
        context_length=16, xl_length=8, memorizing=Memorizing(layers=(1,), top_k=4, capacity=64),
    )  # fmt: skip
    decoder = Decoder(config)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    save_checkpoint(folder, decoder, tokenizer)
    return folder


@pytest.fixture(scope="module")
def checkpoint(remembering) -> Checkpoint:
    return load_checkpoint(remembering)


def plain_logprobs(checkpoint: Checkpoint, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities and keys of a document read at once."""
    inputs = torch.tensor([[checkpoint.tokenizer.start_id, *tokens[:-1].tolist()]])
    with torch.inference_mode():
        hidden, keys = checkpoint.decoder(inputs)
        logprobs = checkpoint.decoder.logprobs(hidden[0])
    return logprobs[torch.arange(len(tokens)), torch.from_numpy(tokens)].numpy(), keys[0].numpy()


@pytest.mark.parametrize("length", [1, 15, 16, 17, 100])
def test_a_document_is_scored_with_all_that_memory_holds(checkpoint, length):
    tokens = torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    expected, _ = plain_logprobs(checkpoint, tokens)
    got = score_tokens(checkpoint.decoder, tokens, checkpoint.tokenizer.start_id)
    np.testing.assert_allclose(got, expected, atol=2e-4)


def test_25_the_score_does_not_depend_on_segments_where_what_is_seen_does_not(checkpoint):
    """With a window a token, segments of any length see the same; no token is dropped at any end."""
    tokens = torch.randint(1, 300, (75,), generator=torch.Generator().manual_seed(9)).numpy()
    config = replace(checkpoint.decoder.config, memorizing=None, windows=(6, 6))
    sums = []
    for segment in (8, 16, 25, 74, 200):
        decoder = Decoder(replace(config, context_length=segment)).eval()
        decoder.load_state_dict(load_checkpoint(checkpoint.path, trainable=True).decoder.state_dict(), strict=False)
        scores = score_tokens(decoder, tokens, checkpoint.tokenizer.start_id)
        assert len(scores) == 75
        sums.append(scores.sum(dtype=np.float64))
    np.testing.assert_allclose(sums, sums[0], rtol=1e-6)


def test_every_document_is_read_from_an_empty_memory(remembering, corpus_folder):
    with load(remembering) as lm:
        texts = [document.text for document in Corpus([corpus_folder])]
        first = [lm.score(text).base.nll for text in texts]
        again = [lm.score(text).base.nll for text in reversed(texts)][::-1]
    assert first == again


def test_a_store_holds_the_keys_of_documents_read_whole(remembering, checkpoint, corpus_folder, tmp_path):
    report = build_index(remembering, Corpus([corpus_folder]), tmp_path / "store")
    with Datastore.open(tmp_path / "store") as store:
        stored = keys_of(tmp_path / "store")
    expected = [
        plain_logprobs(checkpoint, checkpoint.tokenizer.encode(document.text))[1]
        for document in Corpus([corpus_folder])
    ]
    np.testing.assert_allclose(stored.astype(np.float32), np.concatenate(expected), atol=0.02)
    assert report.quality.recall > 0.99
    assert store.manifest.spec.stride == store.manifest.spec.context == 16


def test_a_build_killed_within_a_document_goes_on_with_its_memory(remembering, corpus_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("memlm.indexing.keys.CHECKPOINT_WINDOWS", 7)  # blocks that end within documents
    build_index(remembering, Corpus([corpus_folder]), tmp_path / "whole")
    for killed_at in (2, 4, 6):
        name = f"killed-{killed_at}"
        with pytest.raises(Killed):
            build_index(remembering, Corpus([corpus_folder]), tmp_path / name, progress=kill_at_block(killed_at))
        report = index_keys(tmp_path / name, remembering)
        assert report.resumed_entries > 0
        assert np.array_equal(*(keys_of(tmp_path / each) for each in ("whole", name)))


def kill_at_block(number: int) -> Progress:
    calls = count()

    def kill(phase: str, done: int, total: int | None, note: str = "") -> None:
        if phase == "make keys" and next(calls) == 8 * number:  # 7 windows of a block, and its end
            raise Killed

    return kill


def keys_of(store: Path) -> np.ndarray:
    return np.load(next((store / "segments").glob("*/keys.npy")))


def test_skipping_windows_changes_nothing_that_follows(checkpoint):
    tokens = torch.randint(1, 300, (90,), generator=torch.Generator().manual_seed(2)).numpy()
    windows = list(document_windows(checkpoint.decoder, tokens, checkpoint.tokenizer.start_id))
    whole = Encoder(checkpoint.decoder).keys(windows)
    for skipped in range(len(windows)):
        encoder = Encoder(checkpoint.decoder)
        encoder.skip(windows[:skipped])
        for got, expected in zip(encoder.keys(windows[skipped:]), whole[skipped:], strict=True):
            assert np.array_equal(got, expected)


def test_a_stride_that_would_read_twice_is_refused(remembering, corpus_folder, tmp_path):
    with pytest.raises(InvalidInput, match="leave stride out"):
        build_index(remembering, Corpus([corpus_folder]), tmp_path / "store", stride=4)


def test_22_generation_goes_on_past_any_number_of_segments_and_equals_its_uncached_twin(remembering):
    prompt = "the memory of a model " * 5
    with load(remembering) as lm:
        tokens = list(lm.generate(prompt, max_tokens=60, temperature=0, top_logprobs=1))
        read = lm.checkpoint.tokenizer.prompt(prompt)
        for place, token in enumerate(tokens):
            with torch.inference_mode():
                hidden, _ = lm.checkpoint.decoder(torch.tensor([read]))
                logprobs = lm.checkpoint.decoder.logprobs(hidden[0, -1])
            assert token.lm_logprob == pytest.approx(float(logprobs.max()), abs=2e-4), place
            read.append(token.id)
    assert len(read) > 5 * 16


def test_a_model_that_remembers_goes_on_for_a_segment_where_no_length_is_asked(remembering):
    with load(remembering) as lm:
        assert len(list(lm.generate("the memory " * 30, temperature=0))) <= 16
