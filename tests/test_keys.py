import numpy as np
import pytest
import torch
from reference import decode_plainly

from memlm import keys as keys_module
from memlm.checkpoint import load_checkpoint
from memlm.keys import keys_of, predictions_of, score_tokens
from memlm.windows import windows_of


def windows_for(checkpoint, length: int, context: int = 12, stride: int = 5):
    tokens = torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    return list(windows_of(tokens, start_id=checkpoint.tokenizer.end_id, context=context, stride=stride))


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_keys_in_batches_equal_keys_one_by_one(checkpoint, monkeypatch, batch_tokens):
    monkeypatch.setattr(keys_module, "BATCH_TOKENS", batch_tokens)
    windows = [window for length in (1, 7, 40, 13) for window in windows_for(checkpoint, length)]
    for window, keys_ND in zip(windows, keys_of(checkpoint.decoder, windows), strict=True):
        _, expected_TD = decode_plainly(checkpoint.decoder, window.inputs_T.tolist())
        np.testing.assert_allclose(keys_ND, expected_TD[-len(window.targets_N) :], rtol=2e-4, atol=2e-4)


def test_predictions_are_keys_and_the_targets_logprobs(checkpoint):
    windows = windows_for(checkpoint, 40)
    predictions = predictions_of(checkpoint.decoder, windows)
    for window, (keys_ND, logprobs_N, peaks_N, _) in zip(windows, predictions, strict=True):
        expected_TV, expected_TD = decode_plainly(checkpoint.decoder, window.inputs_T.tolist())
        new = len(window.targets_N)
        np.testing.assert_allclose(keys_ND, expected_TD[-new:], rtol=2e-4, atol=2e-4)
        expected = expected_TV[-new:][np.arange(new), window.targets_N]
        np.testing.assert_allclose(logprobs_N, expected, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(peaks_N, expected_TV[-new:].max(axis=1), rtol=2e-4, atol=2e-4)


def test_bfloat16_keys_are_near_the_exact_ones(checkpoint):
    windows = windows_for(checkpoint, 60)
    exact = np.concatenate(keys_of(checkpoint.decoder, windows))
    near = np.concatenate(keys_of(load_checkpoint(checkpoint.path, dtype=torch.bfloat16).decoder, windows))
    error = np.linalg.norm(near - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0 < np.median(error) < 0.05


def test_a_document_is_scored_whole(checkpoint):
    tokens = checkpoint.tokenizer.encode("the memory of a model can be read " * 12)
    scores_N = score_tokens(checkpoint.decoder, tokens, checkpoint.tokenizer.end_id)
    assert len(scores_N) == len(tokens) > checkpoint.decoder.config.context_length
    first_TV, _ = decode_plainly(checkpoint.decoder, [checkpoint.tokenizer.end_id, *tokens[:20].tolist()])
    np.testing.assert_allclose(scores_N[:21], first_TV[np.arange(21), tokens[:21]], rtol=2e-4, atol=2e-4)
