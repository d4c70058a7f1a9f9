import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from reference import decode_plainly

from memlm.base.cpu import threads
from memlm.data.windows import windows_of
from memlm.model.files.checkpoint import load_checkpoint
from memlm.retrieval import encoder
from memlm.retrieval.encoder import Encoder, predictions_of, score_tokens


def windows_for(checkpoint, length: int, context: int = 12, stride: int = 5):
    tokens = torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(length)).numpy()
    return list(windows_of(tokens, start_id=checkpoint.tokenizer.end_id, context=context, stride=stride))


@pytest.mark.parametrize("batch_tokens", [1, 30, 10_000])
def test_keys_in_batches_equal_keys_one_by_one(checkpoint, monkeypatch, batch_tokens):
    monkeypatch.setattr(encoder, "BATCH_TOKENS", batch_tokens)
    windows = [window for length in (1, 7, 40, 13) for window in windows_for(checkpoint, length)]
    for window, keys_ND in zip(windows, Encoder(checkpoint.decoder).keys(windows), strict=True):
        _, expected_TD = decode_plainly(checkpoint.decoder, window.inputs_T.tolist())
        expected_ND = expected_TD[-len(window.targets_N) :]
        rounding_ND = np.abs(np.spacing(keys_ND)).astype(np.float32) / 2
        assert keys_ND.dtype == np.float16
        assert (np.abs(keys_ND - expected_ND) <= rounding_ND + 2e-4 + 2e-4 * np.abs(expected_ND)).all()


def test_blocks_are_read_in_their_order_and_the_next_one_while_one_is_used(checkpoint, monkeypatch):
    monkeypatch.setattr(encoder, "BATCH_TOKENS", 30)
    blocks = [windows_for(checkpoint, length) for length in (40, 3, 61, 1, 25)]  # also ones of a single batch
    pulled = []

    def pull():
        for block in blocks:
            pulled.append(block)
            yield block

    reading = Encoder(checkpoint.decoder)
    for number, keys in enumerate(reading.keys_of_blocks(pull()), start=1):
        assert len(pulled) == min(number + 1, len(blocks))
        for read, expected in zip(keys, reading.keys(blocks[number - 1]), strict=True):
            np.testing.assert_array_equal(read, expected)
    assert number == len(blocks)


def test_who_stops_does_not_wait_for_what_has_not_begun(checkpoint, monkeypatch):
    monkeypatch.setattr(encoder, "BATCH_TOKENS", 1)  # a window a batch
    decoder, begun, go_on = checkpoint.decoder, [], threading.Event()
    first, second = windows_for(checkpoint, 20), windows_for(checkpoint, 200)

    def keys(tokens_BT, keys=decoder.keys):
        begun.append(tokens_BT)
        assert len(begun) <= len(first) or go_on.wait(10)
        return keys(tokens_BT)

    monkeypatch.setattr(decoder, "keys", keys)
    with threads(2):  # a machine of many cores begins all at once
        reads = Encoder(decoder).keys_of_blocks([first, second])
        next(reads)
        timer = threading.Timer(0.5, go_on.set)
        timer.start()
        reads.close()
        timer.join()
    assert len(begun) <= len(first) + 2 < len(first) + len(second)


def test_what_fails_in_a_batch_is_told_and_the_threads_are_given_back(checkpoint, monkeypatch):
    monkeypatch.setattr(encoder, "BATCH_TOKENS", 1)
    threads = torch.get_num_threads()
    monkeypatch.setattr(checkpoint.decoder, "keys", partial(checkpoint.decoder.keys, wrong=True))
    with pytest.raises(TypeError, match="wrong"):
        Encoder(checkpoint.decoder).keys(windows_for(checkpoint, 40))
    with ThreadPoolExecutor(1) as later:
        assert torch.get_num_threads() == later.submit(torch.get_num_threads).result() == threads


def test_predictions_are_keys_and_the_targets_logprobs(checkpoint):
    windows = windows_for(checkpoint, 40)
    predictions = predictions_of(checkpoint.decoder, windows)
    for window, (keys_ND, logprobs_N, max_logprobs_N, _) in zip(windows, predictions, strict=True):
        expected_TV, expected_TD = decode_plainly(checkpoint.decoder, window.inputs_T.tolist())
        new = len(window.targets_N)
        np.testing.assert_allclose(keys_ND, expected_TD[-new:], rtol=2e-4, atol=2e-4)
        expected = expected_TV[-new:][np.arange(new), window.targets_N]
        np.testing.assert_allclose(logprobs_N, expected, rtol=2e-4, atol=2e-4)
        np.testing.assert_allclose(max_logprobs_N, expected_TV[-new:].max(axis=1), rtol=2e-4, atol=2e-4)


def test_bfloat16_keys_are_near_the_exact_ones(checkpoint):
    windows = windows_for(checkpoint, 60)
    rounded = load_checkpoint(checkpoint.path, dtype=torch.bfloat16).decoder
    decoders = checkpoint.decoder, rounded
    exact, near = (np.concatenate(Encoder(each).keys(windows), dtype=np.float32) for each in decoders)
    error = np.linalg.norm(near - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0 < np.median(error) < 0.05


def test_a_document_is_scored_whole(checkpoint):
    tokens = checkpoint.tokenizer.encode("the memory of a model can be read " * 12)
    scores_N = score_tokens(checkpoint.decoder, tokens, checkpoint.tokenizer.end_id)
    assert len(scores_N) == len(tokens) > checkpoint.decoder.config.context_length
    first_TV, _ = decode_plainly(checkpoint.decoder, [checkpoint.tokenizer.end_id, *tokens[:20].tolist()])
    np.testing.assert_allclose(scores_N[:21], first_TV[np.arange(21), tokens[:21]], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_long_window_in_pieces_says_the_same(checkpoint, monkeypatch, hidden):
    windows = windows_for(checkpoint, 100, context=40, stride=20)
    whole = Encoder(checkpoint.decoder).predictions(windows, hidden=hidden)
    monkeypatch.setattr(encoder, "PASS_TOKENS", 7)
    monkeypatch.setattr(encoder, "LOGITS_ROWS", 3)
    parts = list(Encoder(checkpoint.decoder).parts(windows, hidden=hidden))
    assert None in parts  # the first half of a later window predicts nothing new
    computed = [part for part in parts if part is not None]
    assert max(len(targets_N) for targets_N, _ in computed) <= 7
    np.testing.assert_array_equal(
        np.concatenate([targets_N for targets_N, _ in computed]),
        np.concatenate([window.targets_N for window in windows]),
    )
    for field in ("keys_ND", "logprobs_N", "max_logprobs_N", *(["hidden_ND"] if hidden else [])):
        pieces, expected = (
            [getattr(read, field) for read in reads] for reads in ([read for _, read in computed], whole)
        )
        np.testing.assert_allclose(np.concatenate(pieces), np.concatenate(expected), rtol=2e-4, atol=2e-4)


def test_a_gpu_reads_larger_batches(checkpoint):
    windows = windows_for(checkpoint, 10_000, context=64, stride=64)
    sizes = {
        kind: [tokens_BT.numel() for _, tokens_BT in encoder.batches_of(windows, torch.device(kind))]
        for kind in ("cpu", "cuda")
    }
    assert max(sizes["cpu"]) == encoder.BATCH_TOKENS
    assert max(sizes["cuda"]) == encoder.GPU_BATCH_TOKENS
    assert sum(sizes["cuda"]) <= sum(sizes["cpu"]) + len(windows) * 64
