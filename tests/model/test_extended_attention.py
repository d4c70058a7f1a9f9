"""Extended attention: a head sees its best keys among all tokens that have left its window, at one distance."""

import math

import pytest
import torch
from conftest import SHAPE

from memlm.errors import InvalidInput
from memlm.language_model import load
from memlm.model import Decoder, DecoderState, ModelConfig
from memlm.model.attention.knn_memory import KnnCache
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.positions import apply_rope

WINDOW, SINKS, K = 11, 4, 3


def extended(**changes):
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=90, **{**SHAPE, **changes}).with_attention_window(WINDOW)
    decoder = Decoder(config.with_extended_attention(K)).double().eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
    return decoder


@pytest.fixture
def exact_storage(monkeypatch):
    """Keys in float64, so that rounding chooses no other ones than the twin."""
    made = KnnCache.__init__
    monkeypatch.setattr(KnnCache, "__init__", lambda *of, **named: made(*of, **{**named, "dtype": torch.float64}))


def slow_twin(decoder, ids):
    """Hidden states of a text, by a loop over layers, queries and heads that compares all earlier keys."""
    config = decoder.config
    hidden_TD = decoder.embedding(torch.tensor(ids))
    for layer, block in enumerate(decoder.blocks):
        heads = block.attention.project(block.attention_norm(hidden_TD)[None])
        query_HTd, key_GTd, value_GTd = heads.query_BHTd[0], heads.key_BGTd[0], heads.value_BGTd[0]
        mixed_THd = torch.empty(len(ids), config.num_heads, config.head_dim, dtype=torch.float64)
        for t in range(len(ids)):
            for head in range(config.num_heads):
                group = head * config.num_kv_heads // config.num_heads
                near = [s for s in range(t + 1) if s < SINKS or t - s < WINDOW]
                distances = [min(t, SINKS + WINDOW - 1) - s if s < SINKS else t - s for s in near]
                scores = [score(decoder, layer, query_HTd[head, t], key_GTd[group, s], far)
                          for s, far in zip(near, distances, strict=True)]  # fmt: skip
                gone = {s: score(decoder, layer, query_HTd[head, t], key_GTd[group, s], WINDOW)
                        for s in range(SINKS, t - WINDOW + 1)}  # fmt: skip
                best = sorted(gone, key=gone.__getitem__)[-K:]
                weights = torch.stack([*scores, *(gone[s] for s in best)]).softmax(dim=0)
                mixed_THd[t, head] = weights @ value_GTd[group, [*near, *best]]
        attended_TD = hidden_TD + block.attention.out(mixed_THd.flatten(1))
        hidden_TD = block.finish(attended_TD, block.ff_norm(attended_TD))
    return decoder.norm(hidden_TD)


def score(decoder, layer, query_d, key_d, distance):
    """The score of a key so many tokens before a query."""
    angles = None if decoder.rotary is None else decoder.rotary.of_layer(layer)
    if angles is not None:
        query_d = apply_rope(query_d[None], angles.at(torch.tensor([distance]), (distance, distance + 1)))[0]
    return query_d @ key_d / math.sqrt(decoder.config.head_dim)


@pytest.mark.parametrize("changes", [{}, {"positions": "none"}, {"no_rope_layers": (1,)}])
@torch.inference_mode()
def test_it_is_attention_over_all_keys_that_left_the_window(changes, exact_storage):
    decoder, ids = extended(**changes), [number * 7 % 90 for number in range(60)]
    expected_TD = slow_twin(decoder, ids)
    torch.testing.assert_close(decoder(torch.tensor([ids]))[0][0], expected_TD, atol=1e-9, rtol=1e-9)
    state, parts = decoder.new_state(capacity=200), list[torch.Tensor]()
    for begin, end in ((0, 1), (1, 30), (30, 31), (31, 60)):
        parts.append(decoder(torch.tensor([ids[begin:end]]), state)[0][0])
    torch.testing.assert_close(torch.cat(parts), expected_TD, atol=1e-9, rtol=1e-9)


@torch.inference_mode()
def test_tokens_that_were_taken_back_are_never_seen_again():
    decoder, ids = extended().float(), list(range(50))
    state, straight = decoder.new_state(capacity=200), decoder.new_state(capacity=200)
    decoder(torch.tensor([ids]), state)
    decoder(torch.tensor([[80] * 20]), state)
    state.crop([50])
    decoder(torch.tensor([ids]), straight)
    more = torch.tensor([[*range(30)]])
    assert torch.equal(decoder(more, state)[0], decoder(more, straight)[0])


@torch.inference_mode()
def test_a_copy_and_a_saved_state_see_what_the_state_sees():
    decoder, more = extended().float(), torch.tensor([[5, 6, 7]])
    state = decoder.new_state(capacity=200)
    decoder(torch.tensor([range(60)]), state)
    copy, restored = state.fork(), DecoderState.restore(state.save(), decoder.config)
    decoder(torch.tensor([[1] * 30]), state.fork())
    expected = decoder(more, state)[0]
    assert torch.equal(decoder(more, copy)[0], expected)
    assert torch.equal(decoder(more, restored)[0], expected)


@torch.inference_mode()
def test_rows_of_a_batch_do_not_see_each_other():
    decoder = extended().float()
    state = decoder.new_state(batch_size=2, capacity=200)
    texts = torch.tensor([range(40), range(30, 70)])
    together = decoder(texts, state, new_B=[40, 25])[0]
    for row, count in enumerate((40, 25)):
        alone = decoder(texts[row : row + 1, :count])[0]
        torch.testing.assert_close(together[row : row + 1, :count], alone, atol=1e-4, rtol=1e-4)


def test_a_session_counts_the_bytes_of_its_past(model_folder):
    ids = [number % 90 for number in range(900)]
    sizes = []
    for extended_attention in (None, K):
        with load(model_folder, attention_window=WINDOW, extended_attention=extended_attention) as lm:
            session = lm.session()
            session.append(token_ids=ids)
            sizes.append(lm.engine.sessions._sessions[session.name].state.num_bytes)
    token_bytes = 2 * 2 * 2 * 8 * 2  # layers, keys and values, heads, width, float16
    assert 900 * token_bytes <= sizes[1] - sizes[0] <= (900 + 1024) * token_bytes


def test_within_the_window_it_changes_nothing(model_folder):
    tokens_1T = torch.arange(WINDOW + SINKS)[None]
    with torch.inference_mode():
        given, plain = (
            load_checkpoint(model_folder, attention_window=WINDOW, extended_attention=k).decoder(tokens_1T)[0]
            for k in (K, None)
        )
    assert torch.equal(given, plain)


@pytest.mark.parametrize(
    ("changes", "window", "top_k", "reason"),
    [
        ({}, None, K, "give attention_window too"),
        ({}, WINDOW, 0, "extended_attention is 0"),
        ({"positions": "alibi"}, WINDOW, K, "positions rotary or none; got 4 sinks and alibi"),
    ],
)
def test_models_that_cannot_have_it_are_refused(changes, window, top_k, reason):
    config = ModelConfig(vocab_size=90, **{**SHAPE, **changes})
    config = config if window is None else config.with_attention_window(window)
    with pytest.raises(InvalidInput, match=reason):
        config.with_extended_attention(top_k)


def test_an_earlier_state_holds_no_keys_of_later_tokens():
    decoder = extended()
    state = decoder.new_state(capacity=40)
    with torch.inference_mode():
        decoder.keys(torch.arange(14)[None], state)
    early = state.extract_start(0, 13)
    assert {caches[0].size for caches in early.knn_caches.values()} == {13}
    assert {caches[0].size for caches in state.knn_caches.values()} == {14}
