"""Scores of heads equal sums over all pairs of tokens, in every kind of decoder. Random weights have no role."""

from dataclasses import replace

import pytest
import torch
from decoders import ALL, make, sampled
from planted_heads import inspect_plainly

from memlm.errors import InvalidInput
from memlm.inspect.findings import THRESHOLDS, Role, score_of
from memlm.inspect.heads import Silence, losses, place_scores, repeat_losses, retrieval_scores, uniform_scores
from memlm.inspect.texts import Needle, RepeatedText, needles, repeated_text
from memlm.model import Decoder, ModelConfig


class Attention:
    """Records weights by absolute position, one pair at a time."""

    def __init__(self, front):
        self.weights_of, self.front, self.shares = {}, front, {}

    def weights(self, layer, weights_BHTE, mask):
        self.piece = weights_BHTE, mask

    def gate(self, layer, share_BHT):
        self.shares[layer] = share_BHT

    def heads(self, layer, mixed_BHTd):
        weights_BHTE, mask = self.piece
        share_BHT = self.shares.pop(layer, torch.zeros_like(weights_BHTE[..., 0]))
        for row, position in enumerate(mask.query_RT[0].tolist()):
            for place, key in enumerate(mask.key_RS[0].tolist()):
                if place >= self.front and key <= position:
                    for head in range(weights_BHTE.shape[1]):
                        kept = weights_BHTE[:, head, row, place] * (1 - share_BHT[:, head, row])
                        self.weights_of[layer, head, position, key] = kept.mean().item()
        return mixed_BHTd


@pytest.mark.parametrize("name", sampled(ALL))
def test_scores_are_sums_over_pairs_of_tokens(name):
    decoder = make(ALL[name])
    text = repeated_text(range(40), longest=24, rows=2)
    front = decoder.config.compression.length if decoder.config.compression else 0
    twin = Attention(front)
    with torch.inference_mode():
        decoder(text.tokens_BT, watch=twin)
    found, period = place_scores(decoder, text, mapped=9), text.period
    tokens, repeated = text.tokens_BT[0].tolist(), range(text.period, text.length)
    for layer in range(2):
        for head in range(4):
            at = {(t, s): twin.weights_of.get((layer, head, t, s), 0.0) for t in range(24) for s in range(t + 1)}
            same = [(t, s) for t in repeated for s in range(t) if tokens[s] == tokens[t]]
            expected = {
                "induction": sum(at[t, s + 1] for t, s in same), "duplicate": sum(at[pair] for pair in same),
                "previous": sum(at[t, t - 1] for t in repeated), "first": sum(at[t, 0] for t in repeated),
            }  # fmt: skip
            for score, total in expected.items():
                assert found.sums[score][layer, head].item() == pytest.approx(total / (3 * period), abs=1e-5), score
            segment = decoder.config.context_length
            earlier = sum(weight for (t, s), weight in at.items() if s // segment < t // segment)
            if decoder.config.is_segmented:
                assert found.sums["xl"][layer, head].item() == pytest.approx(earlier / 24, abs=1e-5)
            memories = found.sums["knn"][layer, head] + found.sums["compressed"][layer, head]
            assert memories.item() + sum(at.values()) / 24 == pytest.approx(1, abs=1e-5)
    assert (found.sums["knn"] > 0).any().item() == bool(decoder.config.memorizing)
    assert (found.sums["compressed"] > 0).any().item() == bool(decoder.config.compression)


def test_maps_are_the_weights_of_the_first_row():
    decoder = make(ALL["rotary"])
    text = repeated_text(range(40), longest=24, rows=1)
    twin, found = Attention(0), place_scores(decoder, text, mapped=9)
    with torch.inference_mode():
        decoder(text.tokens_BT, watch=twin)
    for t in range(9):
        for s in range(t + 1):
            assert found.maps_LHPP[1, 3, t, s].item() == pytest.approx(twin.weights_of[1, 3, t, s], abs=1e-6)


def test_uniform_attention_has_the_uniform_scores():
    """A decoder whose queries are zero attends to all places alike."""
    decoder = make(ALL["rotary"])
    with torch.no_grad():
        decoder.blocks[0].attention.qkv.weight[: 4 * 4].zero_()
    text = repeated_text(range(40), (3,), longest=25, rows=2)
    found = place_scores(decoder, text)
    for name, score in uniform_scores(text).items():
        assert found.sums[name][0].tolist() == pytest.approx([score] * 4, abs=1e-6)


def test_a_repeated_text_repeats_after_its_prefix():
    text = repeated_text(range(5, 60), (1, 2), rows=3, seed=4)
    assert (text.period, text.repeats, text.length) == (25, 4, 102)
    for row, other in zip(text.tokens_BT.tolist(), text.shuffled().tokens_BT.tolist(), strict=True):
        assert row[:2] == other[:2] == [1, 2]
        assert len(set(row[2:27])) == 25
        assert row[2:] == row[2:27] * 4
        assert all(sorted(other[2 + 25 * n : 27 + 25 * n]) == sorted(row[2:27]) for n in range(4))
        assert other[2:27] != other[27:52]
    assert torch.equal(text.tokens_BT, repeated_text(range(5, 60), (1, 2), rows=3, seed=4).tokens_BT)
    assert not torch.equal(text.tokens_BT, repeated_text(range(5, 60), (1, 2), rows=3, seed=5).tokens_BT)


def test_a_model_that_reads_too_little_is_refused():
    with pytest.raises(InvalidInput, match="4 times 4"):
        repeated_text(range(40), longest=15)


def test_losses_are_those_of_each_token_alone():
    decoder = make(ALL["rotary"])
    text = repeated_text(range(40), (7,), longest=25, rows=2)
    found = losses(decoder, text)
    total = torch.zeros(text.length - 1)
    with torch.inference_mode():
        for row in text.tokens_BT:
            logprobs_TV = decoder.logprobs(decoder(row[None])[0][0])
            for t in range(text.length - 1):
                total[t] -= logprobs_TV[t, row[t + 1]] / 2
    torch.testing.assert_close(found.float(), total)
    by_repeat = repeat_losses(found, text)
    assert by_repeat == pytest.approx([found[6 * n : 6 * n + 6].mean().item() for n in range(4)])
    assert len(losses(decoder, RepeatedText(text.tokens_BT[:, 1:], 0, 6, 4))) == 23


def test_a_silenced_head_has_its_mean_everywhere():
    mixed_BHTd = torch.randn(2, 4, 5, 3)
    silenced = Silence([(1, 2), (0, 0)]).heads(1, mixed_BHTd)
    for head in range(4):
        expected = mixed_BHTd[:, head]
        if head == 2:
            expected = expected.mean(dim=(0, 1)).expand(2, 5, 3)
        torch.testing.assert_close(silenced[:, head], expected)
    assert Silence([(1, 2)]).heads(0, mixed_BHTd) is mixed_BHTd


def test_retrieval_counts_tokens_that_are_right_and_looked_at():
    """Twin by loops, on a text whose answer the decoder gets right in part."""
    decoder = make(ALL["rotary"])
    ids = [4, 9, 2, 30, 11, 25, 9, 2, 30, 11]
    with torch.inference_mode():
        likeliest = decoder.logits(decoder(torch.tensor([ids]))[0][0]).argmax(dim=1).tolist()
    ids[7], ids[2] = likeliest[6], likeliest[6]  # so that one answer is right
    needle, twin = Needle(ids, [(6, 2), (7, 3), (8, 4)]), Attention(0)
    with torch.inference_mode():
        hidden, _ = decoder(torch.tensor([ids]), watch=twin)
        likeliest = decoder.logits(hidden[0]).argmax(dim=1).tolist()
    found = retrieval_scores(decoder, [needle])
    for layer in range(2):
        for head in range(4):
            hits = 0
            for query, key in needle.answers:
                peak = max(range(query + 1), key=lambda s: twin.weights_of[layer, head, query, s])
                hits += peak == key and likeliest[query] == ids[key]
            assert found[layer, head].item() == pytest.approx(hits / 3)
    assert retrieval_scores(decoder, []) is None


def test_needles_end_with_the_sentence_that_they_have_within(tokenizer):
    texts = list(needles(tokenizer, 300))
    assert texts
    for needle in texts:
        assert len(needle.ids) <= 300
        for query, key in needle.answers:
            assert needle.ids[query + 1] == needle.ids[key]
            assert key < query
        assert needle.answers[-1][0] == len(needle.ids) - 2
    assert not list(needles(tokenizer, 20))


@pytest.mark.parametrize("scale", [1.0, 6.0, 20.0])
@pytest.mark.parametrize("positions", ["rotary", "learned", "alibi", "none"])
def test_heads_of_random_weights_have_no_role(positions, scale):
    """And stay below half of each threshold."""
    torch.manual_seed(1)
    config = ModelConfig(
        vocab_size=200, dim=64, num_layers=4, num_heads=4, num_kv_heads=2, ff_dim=96, context_length=128,
        positions=positions,
    )  # fmt: skip
    decoder = Decoder(config).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    found = inspect_plainly(decoder)
    assert not [head for head in found.heads if head.roles]
    assert found.ablation is None
    assert found.advice.layers == ()
    for role in set(THRESHOLDS) - {Role.FIRST}:
        assert max(score_of(head, role) for head in found.heads) < THRESHOLDS[role] / 2, role


def test_a_model_with_memories_is_inspected():
    decoder = make(replace(ALL["everything"], context_length=12))
    found = inspect_plainly(decoder)
    assert any(head.knn for head in found.heads)
    assert any(head.xl for head in found.heads)
    assert any(head.compressed for head in found.heads)
