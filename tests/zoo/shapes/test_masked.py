"""Masked language modelling hides tokens as BERT does, and teaches an encoder what stands on both sides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from encoders import SHAPE, encoder_tokenizer, make_encoder

from memlm.errors import InvalidInput
from memlm.model.files.encoder_files import load_encoder, padded
from memlm.model.text_encoder import TextEncoder
from memlm.zoo.shapes.encoder_folder import save_encoder
from memlm.zoo.shapes.masked import Masking, learn_masked, masked_loss

SPECIAL = frozenset(range(5))
MASKING = Masking(mask_id=4, vocab_size=40, special_ids=SPECIAL)


def some_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(5, 40, shape, generator=torch.Generator().manual_seed(1))


def test_shares_are_those_of_bert_and_hide_text_only():
    tokens_BT, new_B = some_tokens(400, 50), [50] * 200 + [30] * 200
    tokens_BT[:, 0] = 2
    inputs_BT, chosen_BT = MASKING.hide(tokens_BT, new_B, torch.Generator().manual_seed(2))
    assert not chosen_BT[:, 0].any()
    assert not chosen_BT[200:, 30:].any()
    assert torch.equal(inputs_BT[~chosen_BT], tokens_BT[~chosen_BT])
    hidden, told = inputs_BT[chosen_BT], tokens_BT[chosen_BT]
    num_text = 200 * 49 + 200 * 29
    assert len(hidden) / num_text == pytest.approx(0.15, abs=0.01)
    assert (hidden == 4).float().mean().item() == pytest.approx(0.8, abs=0.03)
    replaced = hidden[(hidden != 4) & (hidden != told)]
    assert len(replaced) / len(hidden) == pytest.approx(0.1 * 34 / 35, abs=0.02)
    assert (replaced >= 5).all()
    assert len(replaced.unique()) > 30
    assert (hidden == told).float().mean().item() == pytest.approx(0.1 + 0.1 / 35, abs=0.02)


def test_each_pass_hides_other_tokens_and_a_seed_the_same():
    tokens_BT, generator = some_tokens(4, 40), torch.Generator().manual_seed(2)
    first, second = (MASKING.hide(tokens_BT, [40] * 4, generator)[1] for _ in range(2))
    again = MASKING.hide(tokens_BT, [40] * 4, torch.Generator().manual_seed(2))[1]
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_loss_counts_the_chosen_tokens_alone():
    encoder = make_encoder()
    tokens_BT, new_B = padded([some_tokens(20).tolist(), some_tokens(9).tolist()])
    inputs_BT, chosen_BT = MASKING.hide(tokens_BT, new_B, torch.Generator().manual_seed(3))
    logprobs_BTV = encoder.logits(encoder(inputs_BT, new_B)).log_softmax(-1)
    places = chosen_BT.nonzero().tolist()
    expected = -np.mean([logprobs_BTV[b, t, tokens_BT[b, t]].item() for b, t in places])
    loss = masked_loss(encoder, inputs_BT, tokens_BT, chosen_BT, new_B)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    assert encoder.embedding.weight.grad.abs().sum() > 0
    assert masked_loss(encoder, inputs_BT, tokens_BT, torch.zeros_like(chosen_BT), new_B).item() == 0


def test_an_encoder_learns_from_the_tokens_behind_a_hidden_one():
    """A small letter stands before its capital, so that nothing before it says which one it is."""
    texts, tokenizer = [each + each.upper() for each in "abcdefgh"], encoder_tokenizer(vocab_size=261)
    torch.manual_seed(0)
    encoder = TextEncoder(replace(SHAPE, vocab_size=261, dim=32, ff_dim=64, num_layers=1))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(4 if parameter.dim() == 2 else 1)  # or it would need more steps
    losses = learn_masked(encoder, tokenizer, texts, num_steps=250, batch_size=64, learning_rate=3e-3)
    assert not encoder.training
    right = 0
    for text in texts:
        (ids,) = tokenizer.encode([text], most=24)
        hidden_BT = torch.tensor([[ids[0], tokenizer.mask_id, *ids[2:]]])
        with torch.inference_mode():
            right += encoder.logits(encoder(hidden_BT)[0, 1]).argmax().item() == ids[1]
    assert right == 8
    assert np.mean(losses[-25:]) < 0.5 * np.log(8)  # nats, of which both letters hidden at once cost some


def test_without_a_head_or_a_text_there_is_nothing_to_learn():
    for encoder, texts in (
        (make_encoder(replace(SHAPE, tied_embeddings=False), has_head=False), ["text"]),
        (make_encoder(), []),
    ):
        with pytest.raises(InvalidInput, match="head"):
            learn_masked(encoder, encoder_tokenizer(), texts, num_steps=1)


@pytest.mark.parametrize("has_head", [True, False])
def test_a_saved_encoder_is_one_of_transformers(tmp_path, has_head):
    config = replace(SHAPE, vocab_size=300, tied_embeddings=has_head)
    encoder = make_encoder(config, has_head=has_head).float()
    saved = save_encoder(tmp_path / "saved", encoder, encoder_tokenizer())
    loaded, tokens_BT = load_encoder(tmp_path / "saved"), some_tokens(1, 20)
    kind = transformers.AutoModelForMaskedLM if has_head else transformers.AutoModel
    theirs = kind.from_pretrained(tmp_path / "saved").eval()
    with torch.inference_mode():
        hidden_BTD, expected = encoder(tokens_BT), theirs(tokens_BT, output_hidden_states=True)
        torch.testing.assert_close(expected.hidden_states[-1], hidden_BTD, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(loaded.encoder(tokens_BT), hidden_BTD, atol=1e-4, rtol=1e-4)
        if has_head:
            torch.testing.assert_close(expected.logits, encoder.logits(hidden_BTD), atol=1e-3, rtol=1e-3)
    assert loaded.fingerprint == saved.fingerprint
