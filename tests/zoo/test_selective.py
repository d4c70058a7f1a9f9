"""What the paper of selective attention says of it (arXiv 2410.02703)."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from zoo.weights import weights_of

from memlm.errors import InvalidInput
from memlm.model import Compression
from memlm.model.state.size import row_bytes

PLAIN = replace(SHAPE, context_length=40)
SELECTIVE = replace(PLAIN, layers=[{"mixer": "selective"}])


def like(config, decoder):
    """A decoder of another config with the same weights."""
    other = make(config)
    other.load_state_dict(decoder.state_dict())
    return other


def one_layer(scores: dict[tuple[int, int], float], others: float = 0.0):
    """A layer without positions in which the query of token a has a score with the key of token b in all heads."""
    config = replace(SELECTIVE, num_layers=1, num_kv_heads=1, num_heads=2, dim=16, head_dim=16, positions="none")
    decoder = make(replace(config, vocab_size=16))
    with torch.no_grad():
        decoder.embedding.weight.copy_(torch.eye(16))  # a norm makes them four times as long
        block = decoder.blocks[0]
        block.attention_norm.weight.fill_(0.25)
        query_DD, key_DD = torch.full((16, 16), others), torch.eye(16)
        for (a, b), score in scores.items():
            query_DD[b, a] = score
        block.attention.qkv.weight[:48] = torch.cat([4 * query_DD, 4 * query_DD, key_DD])  # 4: the root of the width
    return decoder


def test_a_masker_hides_a_token_from_all_later_queries_and_still_sees_it():
    tokens = [9, 3, 5, 4, 6, 7]  # 5 hides 3
    (weights,) = weights_of(one_layer({(5, 3): 40.0}), tokens)
    assert weights[0, :, 2, 1].min() > 0.99
    assert weights[0, :, 3:, 1].max() < 1e-9
    torch.testing.assert_close(weights[0, 0, 5], torch.tensor([0.2, 0, 0.2, 0.2, 0.2, 0.2], dtype=torch.float64))


def test_the_first_token_of_a_document_and_a_token_itself_are_not_hidden():
    decoder = one_layer({(5, 3): 40.0, (3, 3): 40.0})
    (weights,) = weights_of(decoder, [3, 5, 4, 6])
    torch.testing.assert_close(weights[0, 0, 3], torch.full((4,), 0.25, dtype=torch.float64))
    (weights,) = weights_of(decoder, [9, 3, 4, 6])
    torch.testing.assert_close(weights[0, 0, 3], torch.full((4,), 0.25, dtype=torch.float64))


def test_without_positive_scores_of_the_first_head_it_is_plain_attention():
    plain = make(replace(PLAIN, layers=(), positions="none"))
    with torch.no_grad():
        for block in plain.blocks:
            block.attention.qkv.weight[:4].zero_()  # the queries of the first head
    selective = like(replace(SELECTIVE, positions="none"), plain)
    torch.testing.assert_close(logits(selective, tokens_of(30)), logits(plain, tokens_of(30)), atol=1e-12, rtol=0)


@pytest.mark.parametrize(("score", "forget_at", "is_forgotten"), [(40.0, 30.0, True), (40.0, 45.0, False)])
def test_forgetting_a_token_that_is_hidden_by_thirty_changes_nothing(score, forget_at, is_forgotten):
    decoder, tokens = one_layer({(5, 3): score}), [9, 3, 5, 4, 6, 7]
    config = replace(decoder.config, layers=[{"mixer": {"kind": "selective", "forget_at": forget_at}}])
    forgetful = like(config, decoder)
    (weights,) = weights_of(forgetful, tokens)
    assert weights[0, :, 3:, 1].eq(0).all() == is_forgotten
    assert (logits(forgetful, tokens) - logits(decoder, tokens)).abs().max() < 1e-9


def test_forgetting_what_is_hidden_by_little_changes_what_is_read():
    decoder = make(SELECTIVE)
    forgetful = like(replace(SELECTIVE, layers=[{"mixer": {"kind": "selective", "forget_at": 0.5}}]), decoder)
    assert (logits(forgetful, tokens_of(40)) - logits(decoder, tokens_of(40))).abs().max() > 1e-3


def test_a_row_takes_four_bytes_more_for_a_place():
    more = row_bytes(SELECTIVE, 20, torch.float32) - row_bytes(PLAIN, 20, torch.float32)
    assert more == SELECTIVE.num_layers * 20 * 4


def test_memories_of_which_nothing_is_known_to_be_hidden_are_refused():
    with pytest.raises(InvalidInput, match="hidden; leave one out"):
        replace(SELECTIVE, xl_length=4, compression=Compression(length=3, rate=2, kind="mean"))
    with pytest.raises(InvalidInput, match="forget_at"):
        replace(PLAIN, layers=[{"mixer": {"kind": "selective", "forget_at": -1}}])
