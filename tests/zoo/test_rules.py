"""The rules that every part of the decoder obeys, one test a rule (docs/zoo.md).

A new part is one line in ZOO and one entry in a table of twins.py. Float64, fixed seeds.

By default each configuration equals its twin and keeps a fifth of the other rules, and its neighbors in ZOO, which have
parts of its kind, keep the others. The whole grid is `exhaustive`.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from decoders import SHAPE, logits, make, tokens_of
from zoo import seam_parts  # its kinds become known
from zoo.cross_twins import kind_of
from zoo.twins import ZooTwin

from memlm.errors import Incompatible, InvalidInput
from memlm.model import Decoder, DecoderState, ModelConfig
from memlm.model.attention import patterns
from memlm.model.early_exit import ExitRule, forward_early_exit
from memlm.model.exits import Exits
from memlm.model.state.pool import StatePool
from memlm.model.state.size import row_bytes
from memlm.zoo.demix.domains import domains_of, set_domains

assert seam_parts
PLAIN = replace(SHAPE, context_length=40)


def mixed(*mixers: Any, **changes: Any) -> ModelConfig:
    return replace(PLAIN, layers=[{"mixer": mixer} for mixer in mixers], **changes)


def pattern(rule: str, **fields: Any) -> dict[str, Any]:
    return {"kind": "pattern", "rule": rule, **fields}


def channels(*kinds: Any, **changes: Any) -> ModelConfig:
    return replace(PLAIN, layers=[{"channel": kind} for kind in kinds], **changes)


def segmented(*mixers: Any, **changes: Any) -> ModelConfig:
    return mixed(*mixers, context_length=6, **changes)


ONE_MEMORY = {"kind": "recurrent_memory", "memories": 1, "unroll": 3}
SIGNAL = {"kind": "infinite", "bumps": 6, "samples": 5, "widths": (0.1, 0.2), "bins": 7, "penalty": 0.1}
GLOBAL = pattern("global", window=3, num_global=2)
RANDOM = pattern("random", window=2, num_global=1, block=3, num_random=2)
LATEST = {"kind": "lsh", "buckets": 2, "rounds": 2, "span": 2, "seed": 3}
ROUTED = {"kind": "routing", "clusters": 3, "span": 3, "local_heads": 2, "local_window": 2}
SPANS = {"kind": "adaptive_span", "ramp": 3, "longest": 9, "start": 0.4}
RETRO = {"kind": "told", "chunk": 4, "length": 5, "encoder_layers": 1}
ASKING = {"kind": "told", "layers": (0, 1), "chunk": 3, "length": 4, "conditioned": True}
ZOO: dict[str, ModelConfig] = {
    "strided": mixed(pattern("strided", stride=4)),
    "fixed": mixed(pattern("fixed", block=4, summary=2)),
    "dilated": mixed(pattern("dilated", window=3, dilation=2), pattern("dilated", window=2, dilation=3)),
    "global": mixed(GLOBAL),
    "random": mixed(RANDOM),
    "blocks": mixed(pattern("blocks", block=4)),
    "pattern in one layer": mixed("attention", RANDOM),
    "pattern and alibi": mixed(GLOBAL, positions="alibi"),
    "pattern and shaw": mixed(RANDOM, positions="shaw"),
    "pattern in a window": mixed(pattern("strided", stride=3), windows=(9, 9)),
    "pattern beside sinks": mixed(pattern("dilated", window=2, dilation=3), windows=(7, 7), num_sinks=2),
    "pattern and xl": replace(mixed(GLOBAL), xl_length=5, context_length=6),
    "experts": channels({"kind": "experts", "experts": 4, "top": 2, "expert_dim": 12}),
    "switch": channels({"kind": "switch", "experts": 3}),
    "hash": channels({"kind": "hash", "experts": 3}),
    "base": channels({"kind": "base", "experts": 3, "expert_dim": 12}, "feed_forward"),
    "domains": channels({"kind": "domain", "names": ("a", "b", "c"), "expert_dim": 12}),
    "domains in one layer, xl": replace(channels("feed_forward", "domain"), xl_length=5, context_length=6),
    "experts in one layer": channels("feed_forward", {"kind": "experts", "experts": 3, "top": 2}),
    "experts and xl": replace(channels({"kind": "experts", "experts": 3, "top": 2}), xl_length=5, context_length=6),
    "pattern and experts": replace(PLAIN, layers=[{"mixer": GLOBAL, "channel": {"kind": "switch", "experts": 3}}]),
    "differential": mixed("differential"),
    "differential and alibi": mixed("attention", "differential", positions="alibi", num_kv_heads=4),
    "differential beside sinks": mixed("differential", windows=(7, 7), num_sinks=2),
    "differential and xl": replace(mixed("differential"), xl_length=5, context_length=6),
    "differential v2": mixed("differential_v2"),
    "differential v2 and shaw": mixed("differential_v2", "attention", positions="shaw", qk_norm=True),
    "differential v2 and xl": replace(mixed("differential_v2"), xl_length=5, context_length=6),
    "performer": mixed({"kind": "performer", "features": 6}),
    "performer beside attention in segments": replace(
        mixed("attention", {"kind": "performer", "features": 3, "seed": 1}), xl_length=5, context_length=6
    ),
    "rfa": mixed({"kind": "rfa", "draws": 5}),
    "rfa without gate or positions": mixed({"kind": "rfa", "draws": 5, "gate": False}, positions="none"),
    "lsh": mixed({"kind": "lsh", "buckets": 4, "rounds": 2}, num_kv_heads=4),
    "lsh with a span beside sinks": mixed(LATEST, "attention", num_kv_heads=4, windows=(7, 7), num_sinks=2),
    "lsh and xl": replace(mixed(LATEST, num_kv_heads=4), xl_length=5, context_length=6),
    "routing": mixed({"kind": "routing", "clusters": 3}, num_kv_heads=4),
    "routing beside local heads": mixed("attention", ROUTED, num_kv_heads=4, positions="shaw"),
    "routing and xl": replace(mixed(ROUTED, num_kv_heads=4), xl_length=5, context_length=6),
    "selective": mixed("selective"),
    "selective and t5": mixed("selective", "attention", positions="t5"),
    "selective that forgets": mixed({"kind": "selective", "forget_at": 0.4}),
    "selective beside sinks": mixed("selective", windows=(7, 7), num_sinks=2),
    "selective and xl": replace(mixed("selective"), xl_length=5, context_length=6),
    "hyper": mixed({"kind": "hyper", "block": 2, "samples": 2, "projections": 3}),
    "hyper and t5": mixed("attention", {"kind": "hyper", "block": 3, "samples": 1, "seed": 2}, positions="t5"),
    "adaptive span": mixed(SPANS),
    "adaptive span and alibi": mixed(SPANS, "attention", positions="alibi"),
    "adaptive span beside sinks": mixed(SPANS, windows=(7, 7), num_sinks=2),
    "adaptive span and xl": replace(mixed(SPANS), xl_length=5, context_length=6),
    "sums": mixed("decay"),
    "sums beside attention": mixed("decay", "attention"),
    "sums beside a window": mixed("attention", "decay", windows=(6, 0)),
    "sums in segments": replace(mixed("decay"), xl_length=5, context_length=6),
    "fields that add": mixed("fatigue"),
    "fields that add in segments": replace(mixed("fatigue"), xl_length=5, context_length=6),
    "joins": replace(PLAIN, join="gate"),
    "gated residuals": replace(PLAIN, join="gated"),
    "gated residuals and xl": replace(PLAIN, join={"kind": "gated", "start": 0.5}, xl_length=5, context_length=6),
    "a stack": replace(PLAIN, num_layers=4, stack="repeated"),
    "a stack of sums": replace(mixed("decay", "attention"), num_layers=4, stack="repeated"),
    "dense": replace(PLAIN, num_layers=4, stack="dense"),
    "dense with dilation": replace(PLAIN, num_layers=5, stack={"kind": "dense", "dilation": 2, "period": 2}),
    "exits": replace(PLAIN, num_layers=3, stack={"kind": "exits", "halt": "multinomial", "weighting": "sqrt"}),
    "exits in segments": replace(
        mixed(GLOBAL),
        num_layers=4,
        stack={"kind": "exits", "layers": (1, 3), "halt": "geometric"},
        xl_length=5,
        context_length=6,
    ),
    "universal": replace(PLAIN, num_layers=5, stack="universal"),
    "universal in segments": replace(
        PLAIN, num_layers=6, stack={"kind": "universal", "blocks": 2, "signals": False}, xl_length=5, context_length=6
    ),
    "simplified": mixed("shaped", num_kv_heads=4, join="skipless"),
    "simplified and parallel": mixed(
        "shaped", num_kv_heads=4, join="skipless", parallel_residual=True, windows=(5, 9), qk_norm=True
    ),
    "simplified and xl": replace(mixed("shaped", num_kv_heads=4, join="skipless"), xl_length=5, context_length=6),
    "reversible": replace(PLAIN, num_layers=3, stack="reversible"),
    "reversible and others": replace(mixed(GLOBAL, "decay"), stack="reversible", xl_length=5, context_length=6),
    "rounds": replace(PLAIN, num_layers=4, stack={"kind": "looped", "blocks": 2}),
    "rounds of sums": replace(
        mixed("decay"), num_layers=3, positions="none", stack={"kind": "looped", "injects": False}
    ),
    "a border": replace(PLAIN, border="carry", positions="none", context_length=6),
    "recurrent memory": segmented(border={"kind": "recurrent_memory", "memories": 3}),
    "recurrent memory of one vector, alibi": segmented(border=ONE_MEMORY, positions="alibi"),
    "recurrent memory and xl": segmented(border=ONE_MEMORY, xl_length=4, positions="transformer_xl"),
    "retro": replace(PLAIN, cross=RETRO),
    "retro in two layers, conditioned": replace(PLAIN, cross=ASKING, positions="shaw"),
    "retro and xl": replace(PLAIN, cross=RETRO, xl_length=5, context_length=6),
    "infinite, sticky": segmented(SIGNAL, xl_length=4),
    "infinite, even, in one layer": segmented({**SIGNAL, "sticky": False}, "attention", xl_length=5),
    "a source": replace(PLAIN, cross="source"),
    "a source, as T5 reads it": replace(PLAIN, cross="source", positions="t5", query_scale=2.0, num_kv_heads=4),
    "a source beside xl, with biases": replace(
        PLAIN, cross="source", xl_length=5, context_length=6, qkv_bias=True, out_bias=True
    ),
    "a source in rounds": replace(PLAIN, cross="source", num_layers=4, stack={"kind": "looped", "blocks": 2}),
    "recurrent memory beside a pattern": segmented(GLOBAL, "attention", border="recurrent_memory"),
}
SHARE = 5  # of the rules, each configuration keeps one in so many by default
PIECES = ([23], [1] * 23, [5, 1, 2, 11, 4])


@pytest.fixture(scope="module", autouse=True)
def many_places():
    """Patterns copy the places that a token sees once there are a few, and mask the others before."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patterns, "MANY_PLACES", 6)
        patched.setattr(patterns, "MOST_COPIED", 100)
        yield


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Gives a rule the names of all configurations, of which it keeps every fifth by default."""
    if "name" in metafunc.fixturenames:
        rules = [each for each in vars(metafunc.module) if each.startswith("test_")]
        rule = rules.index(metafunc.function.__name__)
        metafunc.parametrize("name", list(sampled(rule)), scope="module")


def sampled(rule: int) -> Iterator[Any]:
    for number, name in enumerate(ZOO):
        is_kept = not rule or (number + rule) % SHARE == 0
        yield name if is_kept else pytest.param(name, marks=pytest.mark.exhaustive)


@pytest.fixture(scope="module")
def decoder(name: str) -> Decoder:
    return make(ZOO[name], made=kind_of(ZOO[name]))


def is_exact(decoder: Decoder) -> bool:
    return all(part.is_exact for part in decoder.config.parts)


def assert_alike(decoder: Decoder, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the bit, where the parts say so of passes of one shape."""
    torch.testing.assert_close(got, expected, atol=0 if is_exact(decoder) else 1e-12, rtol=0)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)


def tensors(state: DecoderState) -> dict[str, torch.Tensor]:
    """What a state holds, rows first and then places."""
    held = {"cache": state.cache_L2BGSd.permute(2, 4, 0, 1, 3, 5)}
    for name, field in ({} if state.fields is None else state.fields.fields).items():
        held[name] = state.field(name) if field.place_axis is None else state.field(name).movedim(field.place_axis, 1)
    return held


def row_of(state: DecoderState, row: int) -> dict[str, torch.Tensor]:
    """What a row holds, as far as it has places."""
    places, fields = state.places_B()[row], {} if state.fields is None else state.fields.fields
    has_places = {name: name not in fields or fields[name].place_axis is not None for name in tensors(state)}
    return {name: held[row][:places] if has_places[name] else held[row] for name, held in tensors(state).items()}


def test_01_it_equals_its_float64_twin(decoder):
    tokens = tokens_of(23)
    got = logits(decoder, tokens)
    np.testing.assert_allclose(got, ZooTwin(decoder).logits(tokens), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("pieces", PIECES[1:], ids=["by token", "uneven"])
def test_02_the_pieces_a_text_comes_in_change_nothing(decoder, pieces):
    tokens, state, begin, got = tokens_of(23), decoder.new_state(capacity=23), 0, []
    for piece in pieces:
        got.append(logits(decoder, tokens[begin : begin + piece], state))
        begin += piece
    assert_close(torch.cat(got), logits(decoder, tokens))


def test_03_a_later_token_changes_nothing_before_it(decoder):
    tokens = tokens_of(23)
    for place in (1, 7, 15, 22):
        others = [*tokens[:place], *tokens_of(23 - place, seed=5)]
        assert_alike(decoder, logits(decoder, others)[:place], logits(decoder, tokens)[:place])


def test_04_rows_of_a_batch_neither_see_nor_need_each_other(decoder):
    rows = [tokens_of(17, seed) for seed in range(3)]
    with torch.inference_mode():
        together = decoder.logits(decoder(torch.tensor(rows))[0])
    for got, row in zip(together, rows, strict=True):
        assert_close(got, logits(decoder, row))


def test_05_rows_of_unequal_lengths_read_as_if_they_were_alone(decoder):
    rows, state = [tokens_of(21, seed) for seed in range(3)], decoder.new_state(batch_size=3, capacity=40)
    alone, done = [logits(decoder, row) for row in rows], [0, 0, 0]
    for new_B in ([5, 2, 0], [1, 1, 1], [0, 3, 6], [7, 1, 4], [1, 0, 1], [1, 1, 1]):
        T = max(new_B)
        padded = [(row[d : d + n] + [9] * T)[:T] for row, d, n in zip(rows, done, new_B, strict=True)]
        before = [{name: tensor.clone() for name, tensor in row_of(state, row).items()} for row in range(3)]
        with torch.inference_mode():
            read = decoder.logits(decoder(torch.tensor(padded), state, new_B=new_B)[0])
        for row, new in enumerate(new_B):
            assert_close(read[row, :new], alone[row][done[row] : done[row] + new])
            done[row] += new
            if not new and decoder.config.border is None:  # a border fills the front of every row
                assert all(torch.equal(held, before[row][name]) for name, held in row_of(state, row).items())
    assert [row.length for row in state.rows] == done


@pytest.mark.parametrize("begins", [{4}, {0, 7}, {5, 6, 13}])
def test_06_a_document_may_begin_anywhere_and_then_the_past_is_as_if_it_were_not(decoder, begins):
    tokens, start = tokens_of(23), max(begins)
    starts_BT = torch.zeros(1, 23, dtype=torch.bool)
    starts_BT[0, list(begins)] = True
    read = []
    for past in (tokens[:start], tokens_of(start, seed=8)):
        for pieces in PIECES:
            state, begin, got = decoder.new_state(capacity=23), 0, []
            for piece in pieces:
                part = slice(begin, begin + piece)
                with torch.inference_mode():
                    ids_BT = torch.tensor([[*past, *tokens[start:]][part]])
                    got.append(decoder.logits(decoder(ids_BT, state, starts_BT=starts_BT[:, part])[0][0]))
                begin += piece
            read.append(torch.cat(got)[start:])
    for other in read[1:]:
        assert_close(other, read[0])
    if not decoder.config.is_segmented and not decoder.config.num_sinks:
        assert_close(read[0], logits(decoder, tokens[start:]))


def test_07_a_reset_row_is_as_good_as_new_and_the_others_do_not_notice(decoder):
    state = decoder.new_state(batch_size=2, capacity=40)
    first, second = tokens_of(9), tokens_of(20, seed=1)
    with torch.inference_mode():
        decoder(torch.tensor([tokens_of(9, seed=2), first]), state)
        state.reset(0)
        read = decoder.logits(decoder(torch.tensor([second, second]), state)[0])
    assert_close(read[0], logits(decoder, second))
    assert_close(read[1], logits(decoder, first + second)[9:])


def test_08_forks_go_their_own_ways(decoder):
    state, tokens = decoder.new_state(capacity=30), tokens_of(21)
    logits(decoder, tokens[:11], state)
    fork = state.fork()
    logits(decoder, tokens_of(9, seed=4), state)
    assert_close(logits(decoder, tokens[11:], fork), logits(decoder, tokens)[11:])


def test_09_a_saved_state_comes_back_bit_equal_and_other_models_refuse_it(decoder):
    state, tokens = decoder.new_state(capacity=30), tokens_of(21)
    logits(decoder, tokens[:11], state)
    saved = state.save()
    back = DecoderState.restore(saved, decoder.config)
    assert back.save() == saved
    assert torch.equal(logits(decoder, tokens[11:], back), logits(decoder, tokens[11:], state))
    with pytest.raises(Incompatible):
        DecoderState.restore(saved, PLAIN)


def test_10_rows_join_and_leave_a_pool_as_if_they_were_alone(decoder):
    pool, texts = StatePool(decoder, most_rows=4, capacity=40), [tokens_of(22, seed) for seed in range(3)]
    alone, read = [logits(decoder, text) for text in texts], [5, 9, 3]

    def join(number: int) -> None:
        state = decoder.new_state(capacity=pool.capacity)
        logits(decoder, texts[number][: read[number]], state)
        pool.grow(1, 40)
        pool.add_row(state)

    def step(numbers: list[int]) -> None:
        ids = torch.tensor([[texts[number][read[number]]] for number in numbers])
        with torch.inference_mode():
            got = decoder.logits(decoder(ids, pool.state)[0])[:, 0]
        for row, number in enumerate(numbers):
            assert_close(got[row], alone[number][read[number]])
            read[number] += 1

    join(0)
    step([0])
    join(1)
    step([0, 1])
    join(2)
    step([0, 1, 2])
    pool.remove_row(0)
    step([2, 1])
    copied = pool.state.extract_row(0, capacity=40)
    assert_close(logits(decoder, texts[2][read[2] :], copied), alone[2][read[2] :])
    step([2, 1])


@pytest.mark.parametrize("kept", [[1, 3], [3, 3], [1, 1]])
def test_11_tokens_that_were_taken_back_were_never_read(decoder, kept):
    texts, state = [tokens_of(21, seed) for seed in range(2)], decoder.new_state(batch_size=2, capacity=40)
    alone, lengths = [logits(decoder, text) for text in texts], [8, 7]
    with torch.inference_mode():
        decoder(torch.tensor([text[:8] for text in texts]), state, new_B=lengths)
        room = min(3, *state.draft_room_B())
        drafts = [[*text[n : n + 1], 39, 38][:room] for text, n in zip(texts, lengths, strict=True)]
        never = state.fork()
        decoder(torch.tensor(drafts), state)
        kept = [min(count, room) for count in kept]
        decoder.crop(state, [n + count for n, count in zip(lengths, kept, strict=True)])
        decoder(torch.tensor(drafts), never, new_B=kept)
    assert [row.length for row in state.rows] == [n + count for n, count in zip(lengths, kept, strict=True)]
    for row in range(2):
        for name, held in row_of(never, row).items():
            assert_close(row_of(state, row)[name], held)
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        one = state.extract_row(row, capacity=40)
        if kept[row] == 1:
            assert_close(logits(decoder, text[length + 1 :], one), alone[row][length + 1 :])


def test_12_a_config_survives_json_and_nonsense_is_refused(decoder):
    config = decoder.config
    given = json.loads(json.dumps(config.as_dict()))
    assert ModelConfig.from_dict(given) == config
    parts = [
        (table, kind) for layer in given.get("layers", []) for kind in layer for table in [layer] if layer[kind] != ""
    ]
    parts += [(given, seam) for seam in ("join", "stack", "border", "cross") if seam in given]
    for table, seam in parts:
        kept = table[seam]
        for nonsense in ("nothing", {"kind": "nothing"}, {"experts": 2}, 7, {"kind": "pattern", "sinks": 1}):
            table[seam] = nonsense
            with pytest.raises(InvalidInput):
                ModelConfig.from_dict(given)
        table[seam] = kept


def test_13_every_parameter_gets_a_gradient(decoder):
    decoder.zero_grad()
    tokens = torch.tensor([tokens_of(40, seed) for seed in range(3)])
    names = domains_of(decoder.config)
    state = decoder.new_state(batch_size=3, training=True) if decoder.config.is_segmented or names else None
    if names:
        set_domains(state, [row % len(names) for row in range(3)])
    hidden, _ = decoder(tokens[:, :-1], state)
    loss = decoder.loss(hidden, tokens[:, 1:])
    told = decoder.take_losses()
    (loss if told is None else loss + told).backward()
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name
    assert decoder.take_losses() is None


def test_14_gradients_are_the_slopes_of_the_twin(decoder):
    """The twin knows no caches. A state detaches what it holds, so the text is one segment."""
    tokens = tokens_of(min(decoder.config.context_length, 11) + 1)
    decoder.zero_grad()
    hidden, _ = decoder(torch.tensor([tokens[:-1]]))
    torch.nn.functional.cross_entropy(decoder.logits(hidden[0]), torch.tensor(tokens[1:])).backward()
    decoder.take_losses()
    twin = ZooTwin(decoder)

    def loss() -> float:
        scores = torch.from_numpy(twin.logits(tokens[:-1]))
        return torch.nn.functional.cross_entropy(scores, torch.tensor(tokens[1:])).item()

    for name, parameter in decoder.named_parameters():
        if parameter.grad is None:
            continue
        place = np.unravel_index(int(parameter.grad.abs().argmax()), parameter.shape)
        weight, ends = twin.w[name].copy(), []
        for step in (1e-5, -1e-5):
            twin.w[name] = weight.copy()
            twin.w[name][place] += step
            ends.append(loss())
        twin.w[name] = weight
        slope = (ends[0] - ends[1]) / 2e-5
        assert parameter.grad[place].item() == pytest.approx(slope, rel=1e-4, abs=1e-8), name


def test_15_keys_without_the_last_feed_forward_are_those_of_a_whole_pass(decoder):
    tokens_BT = torch.tensor([tokens_of(17)])
    with torch.inference_mode():
        assert torch.equal(decoder.keys(tokens_BT), decoder(tokens_BT)[1])


def test_16_an_exit_that_is_never_taken_changes_nothing_and_an_early_one_keeps_the_state_whole(decoder):
    rule, tokens = ExitRule("state", 1.0), tokens_of(12)
    if decoder.config.stack is not None and not isinstance(decoder.config.stack, Exits):
        with pytest.raises(InvalidInput, match="stack"):
            forward_early_exit(decoder, torch.tensor([[1]]), decoder.new_state(), rule)
        return
    state, early = decoder.new_state(capacity=20), decoder.new_state(capacity=20)
    with torch.inference_mode():
        read = [decoder.logits(forward_early_exit(decoder, torch.tensor([[t]]), state, rule)[0])[0, 0] for t in tokens]
        for token in tokens:
            _, used = forward_early_exit(decoder, torch.tensor([[token]]), early, ExitRule("state", 0.0))
            assert used == 1
    assert_close(torch.stack(read), logits(decoder, tokens))
    assert logits(decoder, tokens_of(5), early).isfinite().all()


def test_17_rounded_weights_are_read_by_torch_and_in_any_pieces(name):
    torch.manual_seed(2)
    decoder = kind_of(ZOO[name])(ZOO[name]).eval()
    exact = logits(decoder, tokens_of(23))
    decoder.pack(bits=8)
    assert decoder._native_step is None
    packed, state = logits(decoder, tokens_of(23)), decoder.new_state(capacity=23)
    assert (packed - exact).abs().max() < 0.05 * exact.abs().max()
    pieces = [logits(decoder, tokens_of(23)[begin : begin + 6], state) for begin in range(0, 23, 6)]
    torch.testing.assert_close(torch.cat(pieces), packed, atol=1e-4, rtol=1e-4)


def test_18_a_state_takes_the_bytes_that_are_foretold(decoder):
    state = decoder.new_state(capacity=20)
    source_bytes = 0 if state.sources is None else state.sources.num_bytes
    assert state.num_bytes == row_bytes(decoder.config, 20, decoder.dtype) + source_bytes


def test_19_the_begin_of_a_text_is_what_it_was_or_is_read_anew(decoder):
    tokens, state = tokens_of(14), decoder.new_state(capacity=20)
    logits(decoder, tokens, state)
    start = state.extract_start(0, 13, capacity=30)
    assert start is None or not state.has_sums
    if start is not None:
        more = tokens_of(5, seed=3)
        assert_close(logits(decoder, more, start), logits(decoder, tokens[:13] + more)[13:])
