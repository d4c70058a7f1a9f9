"""The rules by which each memory is proven, one test a rule; what `test_positions_and_memories` proves for all is not
repeated here. Float64 and fixed seeds unless a test says otherwise.
"""

from collections import deque
from dataclasses import replace

import pytest
import torch
from decoders import COMPRESSED, MEMORY, SHAPE, XL, logits, make, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from memlm.model import Compression, Decoder, ModelConfig
from memlm.model.attention.compression import Compressor
from memlm.model.attention.knn_attention import unit
from memlm.model.attention.knn_memory import FAISS_FROM, KnnCache
from memlm.model.attention.mask import AttentionMask
from memlm.model.positions import SCORES, T5Bias
from memlm.model.state.rows import Row
from memlm.model.state.segments import reconstruction_loss

RELATIVE = ["rotary", "alibi", "transformer_xl", "shaw", "t5", "distance", "none"]
MEMORIZING = replace(SHAPE, memorizing=MEMORY)


def with_weights_of(decoder: Decoder, config: ModelConfig) -> Decoder:
    """The same parameters in another shape; what one has and the other has not is left out."""
    other = make(config, seed=9)
    theirs = decoder.weights()
    other.load_state_dict({name: theirs.get(name, mine) for name, mine in other.weights().items()}, strict=False)
    return other


def knn_cache(capacity: int, dtype: torch.dtype = torch.float64, search: str = "exact", heads: int = 1) -> KnnCache:
    return KnnCache(heads, 4, capacity=capacity, dtype=dtype, search=search, device=torch.device("cpu"))


def loss_of(decoder: Decoder, tokens: list[int], state) -> torch.Tensor:
    inputs, targets = torch.tensor([tokens[:-1]]), torch.tensor(tokens[1:])
    return torch.nn.functional.cross_entropy(decoder.logits(decoder(inputs, state)[0][0]), targets)


def gradients(decoder: Decoder) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("positions", RELATIVE)
def test_01_a_transformer_xl_memory_as_long_as_the_text_is_full_context(positions):
    decoder = make(replace(SHAPE, positions=positions, xl_length=40))
    dense = with_weights_of(decoder, replace(SHAPE, positions=positions, context_length=40))
    tokens = tokens_of(36)
    torch.testing.assert_close(logits(decoder, tokens), logits(dense, tokens), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("config", [XL, COMPRESSED, MEMORIZING], ids=["xl", "compressive", "memorizing"])
def test_02_and_15_no_gradient_reaches_the_inputs_of_earlier_segments(config):
    decoder = make(config)
    seen: list[torch.Tensor] = []
    decoder.embedding.register_forward_hook(lambda _m, _i, out: seen.append(out) or out.retain_grad())
    state = decoder.new_state(training=True)
    for begin in range(0, 24, 6):
        loss = loss_of(decoder, tokens_of(25)[begin : begin + 7], state)
    loss.backward()
    assert [None if each.grad is None else bool(each.grad.abs().sum() > 0) for each in seen] == [None, None, None, True]


def test_02_the_projections_learn_from_what_the_transformer_xl_memory_holds():
    """Keys are projected anew from remembered inputs, as in the paper, and not only cached."""
    decoder, tokens = make(XL), tokens_of(13)
    found = []
    for training in (True, False):
        state = decoder.new_state(training=training)
        decoder(torch.tensor([tokens[:6]]), state)
        decoder.zero_grad()
        loss_of(decoder, tokens[6:], state).backward()
        found.append(decoder.blocks[0].attention.qkv.weight.grad.clone())
    assert not torch.allclose(found[0], found[1])

    def loss_at(step: float) -> float:
        weight = decoder.blocks[1].attention.qkv.weight
        state = decoder.new_state(training=True)
        decoder(torch.tensor([tokens[:6]]), state)
        with torch.no_grad():
            weight[9, 2] += step
        loss = loss_of(decoder, tokens[6:], state).item()
        with torch.no_grad():
            weight[9, 2] -= step
        return loss

    state = decoder.new_state(training=True)
    decoder(torch.tensor([tokens[:6]]), state)
    decoder.zero_grad()
    loss_of(decoder, tokens[6:], state).backward()
    slope = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
    assert decoder.blocks[1].attention.qkv.weight.grad[9, 2].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("window", [1, 3, 5])
def test_03_with_a_window_per_token_the_length_of_segments_changes_nothing(window):
    decoder = make(replace(XL, windows=(window, window), xl_length=8))
    tokens = tokens_of(31)
    for segment in (2, 5, 9, 31):
        other = with_weights_of(decoder, replace(decoder.config, context_length=segment))
        torch.testing.assert_close(logits(other, tokens), logits(decoder, tokens), atol=1e-10, rtol=1e-10)


def test_03_a_window_counts_the_token_itself():
    state = make(replace(XL, windows=(4, 4), xl_length=8)).new_state()
    state.advance([6])
    seen = state.attention_mask([3], 3, None).visible(4)[0, 0].sum(dim=1)
    assert seen.tolist() == [4, 4, 4]


@pytest.mark.parametrize("positions", [*SCORES, "t5"])
def test_04_a_relative_position_depends_on_the_distance_alone(positions):
    torch.manual_seed(0)
    config = replace(SHAPE, positions=positions)
    kind = (T5Bias(config) if positions == "t5" else SCORES[positions](config)).double()
    with torch.no_grad():
        for parameter in kind.parameters():
            parameter.add_(torch.randn_like(parameter))
    query, key = torch.randn(1, 4, 3, 4).double(), torch.randn(1, 4, 8, 4).double()
    found = []
    for shift in (0, 700):
        place = torch.arange(8)[None] + shift
        mask = AttentionMask(
            place[:, 5:],
            place,
            (shift + 5, shift + 8),
            (shift, shift + 8),
            torch.zeros(1, 3, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
        )
        found.append(kind(mask) if positions == "t5" else kind(query, key, mask))
    assert torch.equal(*found)
    assert found[0].std() > 0


@pytest.mark.parametrize("normalize", ["both", "memory"])
def test_05_and_09_joint_attention_to_all_of_memory_is_dense_attention_and_counts_nothing_twice(normalize):
    """Without positions, and with keys that mean the same here and there, local and remembered pairs are alike."""
    memory = replace(MEMORY, mixing="joint", top_k=100, capacity=100, normalize="both", layers=(0, 1))
    decoder = make(replace(SHAPE, positions="none", memorizing=memory, xl_length=2 if normalize == "both" else 0))
    dense = with_weights_of(decoder, replace(decoder.config, context_length=40))
    tokens = tokens_of(33)
    torch.testing.assert_close(logits(decoder, tokens), logits(dense, tokens), atol=1e-10, rtol=1e-10)


def test_05_a_query_gets_the_k_best_pairs_of_its_head():
    torch.manual_seed(2)
    memory = knn_cache(capacity=50, heads=2)
    keys = torch.randn(2, 70, 4).double()
    memory.add(keys[:, :33], keys[:, :33])
    memory.add(keys[:, 33:], keys[:, 33:])
    queries = torch.randn(2, 9, 4).double()
    scores, ids = memory.search(queries, 6)
    dense = (queries @ keys.mT)[:, :, 20:]
    best = dense.topk(6, dim=2)
    torch.testing.assert_close(scores, best.values)
    assert torch.equal(ids, best.indices + 20)


def test_06_fewer_pairs_than_k_or_none_add_no_padding_mass():
    decoder = make(replace(SHAPE, memorizing=replace(MEMORY, top_k=6)))
    more = with_weights_of(decoder, replace(SHAPE, memorizing=replace(MEMORY, top_k=1000)))
    without = with_weights_of(decoder, replace(MEMORIZING, context_length=6))
    tokens = tokens_of(12)
    torch.testing.assert_close(logits(decoder, tokens), logits(more, tokens), atol=1e-12, rtol=0)
    assert torch.equal(logits(decoder, tokens[:6]), logits(without, tokens[:6]))
    assert logits(decoder, tokens).isfinite().all()


@pytest.mark.parametrize("mixing", ["gate", "tanh"])
def test_07_a_shut_gate_is_no_memory_and_an_open_one_is_nothing_else(mixing):
    memory = replace(MEMORY, mixing=mixing, normalize="memory")
    decoder = make(replace(SHAPE, memorizing=memory))
    tokens = tokens_of(20)
    gate = decoder.blocks[1].attention.knn.gate_H
    with torch.no_grad():
        gate.fill_(0.0 if mixing == "tanh" else -torch.inf)
    alone = with_weights_of(decoder, replace(SHAPE, context_length=40))
    for begin in range(0, 18, 6):
        # each segment by itself: without a Transformer-XL memory nothing else crosses the border, but its positions
        expected = logits(alone, tokens[begin : begin + 6])
        torch.testing.assert_close(logits(decoder, tokens)[begin : begin + 6], expected, atol=1e-12, rtol=0)
    with torch.no_grad():
        gate.fill_(torch.inf)
    attention = decoder.blocks[1].attention
    local = torch.randn(1, 4, 2, 4).double()
    state = decoder.new_state()
    logits(decoder, tokens[:12], state)
    step_query = torch.randn(1, 4, 2, 4).double()
    found = attention.knn.search(step_query, state.knn_caches[1], _step(state, decoder))
    assert torch.equal(attention.knn.gate(local, found), attention.knn.gate(local * 3, found))


def test_07_the_gate_learns_from_the_start():
    decoder = make(MEMORIZING)
    gate = decoder.blocks[1].attention.knn.gate_H
    with torch.no_grad():
        gate.zero_()
    tokens = tokens_of(13)

    def loss_at(step: float) -> torch.Tensor:
        with torch.no_grad():
            gate[2] += step
        state = decoder.new_state(training=True)
        decoder(torch.tensor([tokens[:6]]), state)
        loss = loss_of(decoder, tokens[6:], state)
        with torch.no_grad():
            gate[2] -= step
        return loss

    loss_at(0.0).backward()
    slope = (loss_at(1e-5) - loss_at(-1e-5)).item() / 2e-5
    assert abs(slope) > 1e-6
    assert gate.grad[2].item() == pytest.approx(slope, rel=1e-4)


@settings(max_examples=60)
@given(
    capacity=st.integers(1, 23),
    steps=st.lists(st.one_of(st.integers(1, 30), st.just("clear"), st.just("fork")), min_size=1, max_size=12),
)
def test_12_and_13_memory_is_a_queue_of_the_last_pairs_whatever_is_added(capacity, steps):
    """Each pair carries its own number: every key comes back with its own value, and none that has left."""
    memory, twin, number = knn_cache(capacity, heads=2), deque(maxlen=capacity), 0
    for step in steps:
        if step == "clear":
            memory.clear()
            twin.clear()
            number = 0
        elif step == "fork":
            memory = memory.fork()
        else:
            numbers = torch.arange(number, number + step).double()
            keys = torch.stack([unit(torch.stack([numbers + 1, numbers**2 + 1, numbers * 0, numbers * 0 + 1], -1))] * 2)
            memory.add(keys, numbers[None, :, None].expand(2, -1, 4))
            twin.extend(range(number, number + step))
            number += step
    assert memory.size == len(twin)
    if not twin:
        return
    queries = torch.randn(2, 3, 4).double()
    scores, ids = memory.search(queries, 50)
    keys, values = memory.pairs(ids)
    for head in range(2):
        for query in range(3):
            assert sorted(ids[head, query].tolist()) == list(twin)
            assert values[head, query, :, 0].tolist() == ids[head, query].tolist()
    torch.testing.assert_close((queries[:, :, None] * keys).sum(-1), scores)


def test_14_memories_need_no_gradient_and_parameters_keep_theirs():
    decoder = make(replace(COMPRESSED, compression=Compression(length=4, rate=2, kind="conv"), memorizing=MEMORY))
    state = decoder.new_state(training=True)
    for begin in range(0, 24, 6):
        loss = loss_of(decoder, tokens_of(25)[begin : begin + 7], state)
    loss.backward()
    assert not state.cache_L2BGSd.requires_grad
    assert not state.inputs_LBSD.requires_grad
    assert all(parameter.requires_grad for parameter in decoder.parameters())
    for name, gradient in gradients(decoder).items():
        if "compressor" in name:
            assert gradient is None, name
        else:
            assert gradient is not None, name
            assert gradient.abs().sum() > 0, name


@pytest.mark.parametrize("kind", ["conv", "dilated", "linear"])
@pytest.mark.parametrize("loss", ["reconstruction", "autoencoding"])
def test_14_the_compression_loss_teaches_the_compression_alone(kind, loss):
    decoder = make(replace(COMPRESSED, compression=Compression(length=4, rate=2, kind=kind, loss=loss, states=3)))

    def compression_loss() -> torch.Tensor:
        state = decoder.new_state(training=True)
        decoder(torch.tensor([tokens_of(18)]), state)
        return state.compression_loss

    compression_loss().backward()
    for name, gradient in gradients(decoder).items():
        assert (gradient is not None) == ("compressor" in name), name
    compressor = decoder.blocks[0].compressor
    kernel, place = (compressor.places_rn, (2, 1)) if kind == "linear" else (compressor.kernel_OIc, (3, 2, 1))
    learnt = kernel.grad[place].item()
    found = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            kernel[place] += step
            found.append(_first_layer_loss(decoder))
            kernel[place] -= step
    assert learnt == pytest.approx((found[0] - found[1]) / 2e-5, rel=1e-4)


def test_14_a_compression_that_does_not_learn_has_no_loss():
    """As where an adapter alone learns."""
    decoder = make(replace(COMPRESSED, compression=Compression(length=4, rate=2, kind="conv"))).requires_grad_(False)
    decoder.blocks[0].attention.out.weight.requires_grad_(True)
    state = decoder.new_state(training=True)
    hidden_BTD, _ = decoder(torch.tensor([tokens_of(18)]), state)
    assert hidden_BTD.requires_grad
    assert state.compression_loss is None


def _first_layer_loss(decoder: Decoder) -> float:
    """The compression loss with gradients on, as training has it; only the first layer's changes here."""
    with torch.enable_grad():
        state = decoder.new_state(training=True)
        frozen = [block.compressor for block in decoder.blocks[1:]]
        for block in decoder.blocks[1:]:
            block.compressor.learns = False
        decoder(torch.tensor([tokens_of(18)]), state)
        for compressor in frozen:
            compressor.learns = True
        return state.compression_loss.item()


@pytest.mark.parametrize("kind", ["mean", "max", "conv"])
@pytest.mark.parametrize("positions", ["rotary", "transformer_xl", "alibi"])
def test_16_a_compression_rate_of_one_is_a_longer_transformer_xl_memory(kind, positions):
    config = replace(XL, positions=positions, xl_length=4, compression=Compression(length=5, rate=1, kind=kind))
    decoder = make(config)
    if kind == "conv":
        for block in decoder.blocks:
            torch.nn.init.zeros_(block.compressor.bias_O)
            with torch.no_grad():
                block.compressor.kernel_OIc.copy_(torch.eye(16)[:, :, None])
    longer = with_weights_of(decoder, replace(XL, positions=positions, xl_length=9))
    tokens = tokens_of(33)
    torch.testing.assert_close(logits(decoder, tokens), logits(longer, tokens), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("kind", ["mean", "conv", "dilated", "linear"])
@pytest.mark.parametrize("rate", [1, 2, 3, 4])
def test_16_every_state_contributes_to_exactly_one_compressed_state(kind, rate):
    compression = Compression(length=9, rate=rate, kind=kind, states=2)
    tagged = torch.eye(24)[None]
    compressed = Compressor(replace(XL, dim=24, num_heads=4, head_dim=6), compression)(tagged, None)[0].detach()
    assert compressed.shape == (24 // rate, 24)
    torch.testing.assert_close(compressed.sum(dim=0), torch.full((24,), 1 / rate))
    assert ((compressed > 0).sum(dim=0) == 1).all()
    assert ((compressed > 0).sum(dim=1) == rate).all()


@pytest.mark.parametrize("kind", ["mean", "max", "conv", "dilated", "linear"])
def test_16_a_constant_memory_stays_what_it_is(kind):
    constant = torch.full((1, 12, 16), 0.7)
    compressed = Compressor(XL, Compression(length=9, rate=3, kind=kind))(constant, None)
    torch.testing.assert_close(compressed, constant[:, :4])


def test_16_linear_compression_with_rows_of_the_identity_keeps_those_states_alone():
    """So attention equals that over the chosen places, and places may be mixed before or after the projection."""
    compressor = Compressor(XL, Compression(length=9, rate=3, kind="linear", states=2)).double()
    old, project = torch.randn(2, 12, 16).double(), torch.randn(16, 8).double()
    projected = compressor(old @ project, None)
    torch.testing.assert_close(projected, compressor(old, None) @ project, atol=1e-12, rtol=0)
    with torch.no_grad():
        compressor.places_rn.copy_(torch.eye(6)[[1, 5]])
    assert torch.equal(compressor(old, None), old[:, [1, 5, 7, 11]])


def test_16_a_model_starts_its_linear_compression_as_means_and_a_group_that_is_not_full_waits():
    config = replace(SHAPE, xl_length=2, compression=Compression(length=6, rate=2, kind="linear", states=4))
    decoder = Decoder(config).double().eval()
    means = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 0.5, 0.5]]).double()
    torch.testing.assert_close(decoder.blocks[0].compressor.places_rn.data[:2, :4], means)
    state = decoder.new_state()
    lengths = []
    for _ in range(3):
        logits(decoder, tokens_of(6), state)
        lengths.append((state.rows[0].floor, state.rows[0].compressed))
    assert lengths == [(0, 0), (8, 4), (16, 6)]


def test_17_reconstruction_costs_nothing_where_nothing_is_lost():
    decoder = make(replace(XL, xl_length=4, compression=Compression(length=5, rate=1, kind="conv")))
    attention = decoder.blocks[0].attention
    queries, old = torch.randn(2, 6, 16).double(), torch.randn(2, 8, 16).double()
    assert reconstruction_loss(attention, queries, old, old).item() == 0.0
    assert reconstruction_loss(attention, queries, old, old.flip(1)).item() < 1e-20  # there are no positions in it
    assert reconstruction_loss(attention, queries, old, old[:, :4]).item() > 1e-6
    assert reconstruction_loss(attention, queries.requires_grad_(), old, old[:, :4]).requires_grad is False


def test_18_the_most_used_states_survive_in_their_order():
    compressor = Compressor(XL, Compression(length=9, rate=3, kind="most_used"))
    old, usage = torch.randn(2, 6, 16), torch.tensor([[0.1, 9.0, 0.2, 0.3, 0.1, 7.0], [5.0, 0, 0, 0, 4.0, 0]])
    compressed = compressor(old, usage)
    assert torch.equal(compressed[0], old[0, [1, 5]])
    assert torch.equal(compressed[1], old[1, [0, 4]])


@pytest.mark.parametrize("normalize", ["both", "memory"])
def test_19_stored_keys_have_length_one_and_one_temperature_serves_search_and_softmax(normalize):
    decoder = make(replace(SHAPE, memorizing=replace(MEMORY, normalize=normalize)))
    state = decoder.new_state()
    logits(decoder, tokens_of(20), state)
    row = state.knn_caches[1][0]
    keys, _ = row.pairs(torch.arange(row.count - row.size, row.count).expand(2, 1, -1))
    torch.testing.assert_close(keys.norm(dim=-1), torch.ones_like(keys[..., 0]))
    memory = decoder.blocks[1].attention.knn
    query = torch.randn(1, 4, 3, 4).double()
    normalized_query = memory.normalize(query) if memory.normalizes_all else query
    found = memory.search(normalized_query, [row], _step(state, decoder))
    expected = unit(query) * memory.log_scale_H.exp()[:, None, None]
    scores = expected[0].view(2, 2, 3, 4) @ keys.mT.expand(2, 1, 4, -1).reshape(2, 1, 4, -1)
    torch.testing.assert_close(found.scores_BHTK[0].view(2, 2, 3, 3), scores.topk(3, dim=-1).values)


def test_20_the_order_of_memory_and_where_the_text_stands_change_nothing():
    decoder = make(replace(SHAPE, memorizing=MEMORY, xl_length=4))
    state = decoder.new_state()
    logits(decoder, tokens_of(18), state)
    shuffled = state.fork()
    ring, size = shuffled.knn_caches[1][0]._ring_2GNd, shuffled.knn_caches[1][0].size
    ring[:, :, :size] = ring[:, :, torch.randperm(size)]
    expected = logits(decoder, tokens_of(6, 3), state)
    torch.testing.assert_close(logits(decoder, tokens_of(6, 3), shuffled), expected, atol=1e-12, rtol=0)
    fresh, moved = decoder.new_state(), decoder.new_state()
    moved.rows = [Row(base=240_000, length=240_000, start=240_000, floor=240_000)]
    torch.testing.assert_close(
        logits(decoder, tokens_of(25, 3), moved), logits(decoder, tokens_of(25, 3), fresh), atol=1e-9, rtol=0
    )


def test_21_memory_goes_stale_when_weights_change_and_a_new_state_does_not_hold_any():
    decoder = make(MEMORIZING)
    stale = decoder.new_state(training=True)
    logits(decoder, tokens_of(18), stale)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn_like(parameter) * 1e-2)
    rewritten = decoder.new_state(training=True)
    assert rewritten.knn_caches[1][0].size == 0
    logits(decoder, tokens_of(18), rewritten)
    old, new = (state.knn_caches[1][0]._ring_2GNd[0] for state in (stale, rewritten))
    drift = 1 - (old * new).sum(-1)[:, :11].mean()
    assert 1e-6 < drift < 0.5


def test_24_faiss_finds_most_of_what_exact_search_finds():
    torch.manual_seed(5)
    centres = torch.randn(60, 4)
    keys = unit(centres[torch.randint(60, (9000,))] + 0.3 * torch.randn(9000, 4))[None]
    exact, faiss = knn_cache(8000, torch.float32), knn_cache(8000, torch.float32, search="faiss")
    for memory in (exact, faiss):
        for begin in range(0, 9000, 500):
            memory.add(keys[:, begin : begin + 500], keys[:, begin : begin + 500])
            if memory.size >= FAISS_FROM:
                memory.search(keys[:, :8], 4)  # learns its cells early, so that what is added later goes into them
    queries = unit(keys[:, 5000:5200] + 0.05 * torch.randn(1, 200, 4))
    (scores, ids), (near, found) = exact.search(queries, 16), faiss.search(queries, 16)
    assert found.min() >= 1000
    hits = [len(set(a) & set(b)) for a, b in zip(ids[0].tolist(), found[0].tolist(), strict=True)]
    assert sum(hits) / (16 * 200) > 0.9
    torch.testing.assert_close(near[:, :, 0], scores[:, :, 0], atol=2e-3, rtol=0)


def test_24_a_decoder_that_searches_with_faiss_forks_saves_and_restores():
    from memlm.model import DecoderState

    config = replace(SHAPE, context_length=64, memorizing=replace(MEMORY, search="faiss", capacity=10_000))
    decoder = make(config).float()
    state = decoder.new_state()
    logits(decoder, tokens_of(5000), state)
    fork, restored = state.fork(), DecoderState.restore(state.save(), config)
    expected = logits(decoder, tokens_of(300, 2), state)
    assert torch.equal(logits(decoder, tokens_of(300, 2), fork), expected)
    assert torch.equal(logits(decoder, tokens_of(300, 2), restored), expected)
    near = with_weights_of(decoder, replace(config, memorizing=replace(config.memorizing, search="exact")))
    exactly = near.float().new_state()
    logits(near, tokens_of(5000), exactly)
    assert (logits(near, tokens_of(300, 2), exactly) - expected).abs().mean() < 0.05


def test_28_float16_memory_is_near_and_long_runs_stay_sound():
    full = make(replace(SHAPE, memorizing=MEMORY))
    half = with_weights_of(full, replace(SHAPE, memorizing=replace(MEMORY, storage="float16")))
    tokens = tokens_of(33)
    difference = (logits(half, tokens) - logits(full, tokens)).abs().max()
    assert 0 < difference < 0.02
    memory = knn_cache(1000, torch.float16)
    block = unit(torch.randn(1, 10_007, 4))
    for _ in range(100):
        memory.add(block, block)
    assert memory.count == 1_000_700
    scores, ids = memory.search(block[:, -5:].double(), 1)
    torch.testing.assert_close(scores[0, :, 0], torch.ones(5).double(), atol=2e-3, rtol=0)
    assert ids[0, :, 0].min() >= memory.count - 1000


def test_28_a_query_without_any_memory_gets_nothing_and_no_nan():
    decoder = make(replace(SHAPE, memorizing=MEMORY))
    state = decoder.new_state(batch_size=2)
    with torch.inference_mode():
        decoder(torch.tensor([tokens_of(9), tokens_of(9)]), state, new_B=[9, 2])
        together = decoder(torch.tensor([[3], [4]]), state)[0]
    assert together.isfinite().all()


@pytest.mark.parametrize("positions", list(SCORES))
def test_gradients_of_positions_equal_finite_differences(positions):
    torch.manual_seed(3)
    kind = SCORES[positions](replace(SHAPE, dim=8, head_dim=4, num_heads=2, num_kv_heads=2)).double()
    with torch.no_grad():
        for parameter in kind.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    place = torch.arange(5)[None]
    zeros_13, zeros_1 = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    mask = AttentionMask(place[:, 2:], place, (2, 5), (0, 5), zeros_13, zeros_1)
    query = torch.randn(1, 2, 3, 4).double().requires_grad_()
    key = torch.randn(1, 2, 5, 4).double().requires_grad_()
    names, parameters = zip(*kind.named_parameters(), strict=True)

    def scores_and_values(query, key, *parameters):
        given_parameters = dict(zip(names, parameters, strict=True))
        scores = torch.func.functional_call(kind, given_parameters, (query, key, mask))
        if positions != "shaw":
            return scores
        return scores, scores.softmax(-1) @ given_parameters["vectors.weight"][:5]

    assert torch.autograd.gradcheck(scores_and_values, (query, key, *parameters))


def _step(state, decoder):
    from memlm.model.forward import ForwardContext

    return ForwardContext(state.attention_mask([1], 1, None), [1], decoder.dtype, state)
