"""Recurrent memory: what the paper says of it, its gradients through segments, and training."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from decoders import SHAPE, logits, make, tokens_of
from training_runs import TINY
from zoo.twins import ZooTwin

from memlm.data.corpus import Corpus
from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import load_checkpoint
from memlm.training.train import train

SEGMENT = SHAPE.context_length
BORDER = {"kind": "recurrent_memory", "memories": 2, "unroll": 3}
RECURRENT = replace(SHAPE, border=BORDER)


@pytest.mark.parametrize("pieces", [[18], [4, 7, 7]], ids=["at once", "in pieces of segments"])
def test_gradients_of_a_pass_are_the_slopes_of_the_form_without_caches(pieces):
    """The twin reads three segments. Pieces of one pass end within segments."""
    decoder, tokens = make(RECURRENT), tokens_of(3 * SEGMENT + 1)
    hidden_BTD, _ = decoder(torch.tensor([tokens[:-1]]))
    if len(pieces) > 1:  # what a pass learns does not depend on how next_piece cuts it
        state = decoder.new_state(training=True)
        cuts = iter(pieces)
        whole, state.next_piece = state.next_piece, lambda count: min(whole(count), next(cuts, count))
        hidden_BTD, _ = decoder(torch.tensor([tokens[:-1]]), state)
    F.cross_entropy(decoder.logits(hidden_BTD[0]), torch.tensor(tokens[1:])).backward()
    twin = ZooTwin(decoder)

    def loss() -> float:
        scores = torch.from_numpy(twin.logits(tokens[:-1]))
        return F.cross_entropy(scores, torch.tensor(tokens[1:])).item()

    for name, parameter in decoder.named_parameters():
        place = np.unravel_index(int(parameter.grad.abs().argmax()), parameter.shape)
        weight, ends = twin.w[name].copy(), []
        for step in (1e-5, -1e-5):
            twin.w[name] = weight.copy()
            twin.w[name][place] += step
            ends.append(loss())
        twin.w[name] = weight
        assert parameter.grad[place].item() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-8), name


def test_a_loss_in_the_third_segment_has_gradients_for_tokens_of_the_first_alone_within_one_pass():
    decoder, tokens = make(RECURRENT), [*range(SEGMENT), *[30] * (2 * SEGMENT)]

    def gradient_of_first_tokens(passes: list[int]) -> float:
        decoder.zero_grad()
        state, begin = decoder.new_state(training=True), 0
        for size in passes:
            hidden_BTD, _ = decoder(torch.tensor([tokens[begin : begin + size]]), state)
            begin += size
        hidden_BTD[0, -1].square().sum().backward()
        return decoder.embedding.weight.grad[:SEGMENT].abs().max().item()

    assert gradient_of_first_tokens([18]) > 1e-3
    assert gradient_of_first_tokens([6, 12]) == 0.0


def test_the_memory_carries_the_first_segment_to_the_next_and_nothing_else_does():
    decoder, tokens = make(RECURRENT), tokens_of(14)
    changed = [(tokens[0] + 1) % 40, *tokens[1:]]
    assert (logits(decoder, changed) - logits(decoder, tokens))[SEGMENT:].abs().min() > 1e-6
    frozen = make(RECURRENT)
    frozen.border.end = lambda decoder, state: None if state.length % SEGMENT else forget(state)

    def forget(state) -> None:
        for row in state.rows:
            row.floor = row.length
        state.compact()

    assert torch.equal(logits(frozen, changed)[SEGMENT:], logits(frozen, tokens)[SEGMENT:])
    assert torch.equal(logits(frozen, tokens)[:SEGMENT], logits(decoder, tokens)[:SEGMENT])


def test_a_document_starts_from_the_learned_memory_wherever_it_begins():
    """At the begin of a segment it reads that memory. Within one, it writes from it, and reads it in no place."""
    decoder, tokens = make(RECURRENT), tokens_of(17)
    for start in (SEGMENT, SEGMENT + 2):
        starts_BT = torch.zeros(1, 17 + start, dtype=torch.bool)
        starts_BT[0, start] = True
        read = []
        for seed in (5, 6):
            ids_BT = torch.tensor([[*tokens_of(start, seed), *tokens]])
            with torch.inference_mode():
                read.append(decoder.logits(decoder(ids_BT, starts_BT=starts_BT)[0])[0, start:])
        torch.testing.assert_close(read[0], read[1], atol=0, rtol=0)
        if start == SEGMENT:
            torch.testing.assert_close(read[0], logits(decoder, tokens), atol=1e-10, rtol=1e-10)


def test_training_reads_several_segments_in_a_step_and_the_trained_model_equals_its_twin(tmp_path):
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"{number}.txt").write_text("a far word comes back, a far word comes back. " * 20)
    config = replace(TINY, steps=3, context_length=16, model_fields={"border": {**BORDER, "unroll": 2}})
    report = train(Corpus([tmp_path / "texts"]), tmp_path / "model", config)
    assert report.tokens == 3 * config.batch_size * 32  # two segments in a step
    decoder = load_checkpoint(tmp_path / "model").decoder
    assert decoder.border.first_MD.abs().sum() > 0
    tokens = [token % decoder.config.vocab_size for token in tokens_of(40)]
    np.testing.assert_allclose(logits(decoder, tokens), ZooTwin(decoder).logits(tokens), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": "learned"}, "no learned positions"),
        ({"layers": [{"mixer": "decay"}]}, "sums of decay"),
        ({"layers": [{"mixer": "fatigue"}]}, "sums of fatigue"),
        ({"layers": [{"channel": "hash"}]}, "no tokens, by which hash"),
        ({"memorizing": {"layers": (1,)}}, "without a kNN memory"),
        ({"border": {"kind": "recurrent_memory", "memories": 0}}, "memories is 0"),
        ({"border": {"kind": "recurrent_memory", "unroll": 0}}, "unroll is 0"),
    ],
)
def test_configs_that_the_memory_does_not_go_with_are_refused_in_words(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(RECURRENT, **changes)
