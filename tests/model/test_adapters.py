"""Adapters change a decoder as their formulas say, row by row, and leave nothing behind."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from decoders import ALL, SHAPE, logits, make, plain, sampled, tokens_of
from random_adapters import SPECS, random_adapter

from memlm.errors import InvalidInput, NotFound
from memlm.model import Decoder, DecoderState
from memlm.model.adapters import Adapter, Bottleneck, LoRA, merge, new_adapter, parse_adapter
from memlm.model.files.adapter_files import AdapterNames
from memlm.model.kernels import native
from memlm.model.kernels.linear import Linear

CONFIG = plain("rotary")


def twin_of(decoder: Decoder, adapter: Adapter) -> Decoder:
    """A decoder without adapters that computes what one with the adapter should: LoRA in its weights, the other by
    hooks.
    """
    twin = copy.deepcopy(decoder)
    linears = {name: linear for name, linear in twin.named_modules() if isinstance(linear, Linear)}
    for name, layer in adapter.by_name.items():
        if isinstance(adapter.spec, LoRA):
            for part, down_rI, up_or in zip(layer.parts, layer.downs, layer.ups, strict=True):
                delta = adapter.spec.alpha / adapter.spec.rank * (up_or @ down_rI)
                linears[name].weight.data[part.begin : part.begin + part.size] += delta.detach()
        else:
            weights = {key: tensor.detach() for key, tensor in layer.state_dict().items()}

            def hook(module, inputs, y, w=weights):
                inner = (y @ w["down.weight"].T + w["down.bias"]).clamp(min=0)
                return y + inner @ w["up.weight"].T + w["up.bias"]

            linears[name].register_forward_hook(hook)
    return twin


def attached(decoder: Decoder, adapter: Adapter, name: str = "a") -> Decoder:
    decoder.adapters.attach(name, adapter, decoder)
    return decoder


def read(decoder: Decoder, tokens: Sequence[int], adapter: str | None, pieces: int = 40) -> torch.Tensor:
    """The logits of a text that is read in pieces with an adapter."""
    state = decoder.new_state(capacity=40, adapters_B=[adapter])
    with torch.inference_mode():
        parts = [decoder(torch.tensor([tokens[at : at + pieces]]), state)[0][0] for at in range(0, len(tokens), pieces)]
        return decoder.logits(torch.cat(parts))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", sampled(ALL))
def test_a_new_adapter_changes_no_bit_and_a_learned_one_changes_what_its_formula_says(name, spec):
    decoder, tokens = make(ALL[name]), tokens_of(17)
    before = logits(decoder, tokens, decoder.new_state(capacity=40))
    new, learned = new_adapter(spec, decoder, AdapterNames(decoder).parts).double(), random_adapter(spec, decoder)
    twin = twin_of(decoder, learned)
    attached(attached(decoder, new, "new"), learned, "learned")
    assert torch.equal(read(decoder, tokens, "new"), before)
    assert torch.equal(read(decoder, tokens, None), before)
    expected = logits(twin, tokens, twin.new_state(capacity=40))
    assert not torch.allclose(expected, before, atol=1e-3)
    torch.testing.assert_close(read(decoder, tokens, "learned", pieces=5), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", sampled(ALL))
def test_rows_with_different_adapters_equal_each_alone(name):
    decoder = make(ALL[name])
    names: list[str | None] = [None]
    for number, spec in enumerate([*SPECS.values(), LoRA(rank=7, alpha=1.0, targets=("o_proj",))]):
        attached(decoder, random_adapter(spec, decoder, seed=number + 5), f"a{number}")
        names.append(f"a{number}")
    texts, counts = [tokens_of(13, seed) for seed in range(len(names))], [[4, 2, 4, 1, 3], [1, 4, 0, 4, 2]]
    state = decoder.new_state(batch_size=len(names), capacity=40, adapters_B=names)
    found = [[] for _ in names]
    with torch.inference_mode():
        for new_B in counts:
            begin_B = [row.length for row in state.rows]
            rows = [text[at : at + 4] for text, at in zip(texts, begin_B, strict=True)]
            hidden_BTD, _ = decoder(torch.tensor(rows), state, new_B=new_B)
            for row, count in enumerate(new_B):
                found[row].append(decoder.logits(hidden_BTD[row, :count]))
    for row, adapter in enumerate(names):
        alone = read(decoder, texts[row][: state.rows[row].length], adapter)
        torch.testing.assert_close(torch.cat(found[row]), alone, rtol=1e-9, atol=1e-9)


def test_a_row_keeps_its_adapter_wherever_it_goes():
    decoder, tokens = make(CONFIG), tokens_of(12)
    attached(decoder, random_adapter(SPECS["lora"], decoder))
    expected = read(decoder, tokens, "a")[-1]
    state = decoder.new_state(capacity=40, adapters_B=["a"])
    with torch.inference_mode():
        decoder(torch.tensor([tokens[:-1]]), state)
        copies = {
            "fork": state.fork(), "row": state.extract_row(0, capacity=40),
            "start": state.extract_start(0, 11, capacity=40),
            "restored": DecoderState.restore(state.extract_row(0, capacity=40).save(), CONFIG),
        }  # fmt: skip
        moved = decoder.new_state(batch_size=2, capacity=40)
        moved.copy_row(1, state, 0)
        assert [row.adapter for row in moved.rows] == [None, "a"]
        for name, twin in copies.items():
            last = decoder.logits(decoder(torch.tensor([tokens[-1:]]), twin)[0][0])
            torch.testing.assert_close(last[0], expected, rtol=1e-9, atol=1e-9, msg=name)
    state.reset(0)
    assert state.rows[0].adapter == "a"


def test_a_state_without_an_adapter_is_saved_as_ever():
    """Earlier versions read it."""
    assert b"adapter" not in make(CONFIG).new_state().save()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_detached_adapter_leaves_the_same_bits_and_is_asked_for_in_vain(spec):
    decoder, tokens = make(CONFIG), tokens_of(9)
    before = logits(decoder, tokens)
    attached(decoder, random_adapter(spec, decoder))
    state = decoder.new_state(capacity=20, adapters_B=["a"])
    decoder.adapters.default = "a"
    assert not torch.equal(logits(decoder, tokens), before)
    decoder.adapters.detach("a", decoder)
    assert torch.equal(logits(decoder, tokens), before)
    assert all(module.adapters is None for module in decoder.modules() if isinstance(module, Linear))
    with pytest.raises(NotFound, match="no adapter 'a'; none is loaded"):
        decoder(torch.tensor([tokens]), state)
    with pytest.raises(NotFound, match="no adapter 'a'"):
        decoder.new_state(adapters_B=["a"])


def test_only_the_adapter_learns_and_its_gradients_are_those_of_the_twin():
    config = replace(SHAPE, context_length=40)
    for spec in SPECS.values():
        decoder = make(config).requires_grad_(False)
        adapter, tokens = random_adapter(spec, decoder), torch.tensor([tokens_of(8), tokens_of(8, 1)])
        twin = twin_of(decoder, adapter)
        decoder.adapters.attach("a", adapter, decoder, trainable=True)
        decoder.adapters.default = "a"
        decoder.logits(decoder(tokens)[0]).logsumexp(-1).sum().backward()
        assert all(parameter.grad is None for parameter in decoder.parameters())
        assert all(parameter.grad is not None and parameter.grad.any() for parameter in adapter.parameters())
        if isinstance(spec, LoRA):  # dL/dB = scale dL/dW A', for the weight of the twin
            twin.logits(twin.requires_grad_(True)(tokens)[0]).logsumexp(-1).sum().backward()
            layer = adapter.by_name["blocks.1.attention.qkv"]
            grad_OI = twin.blocks[1].attention.qkv.weight.grad
            for part, down_rI, up_or in zip(layer.parts, layer.downs, layer.ups, strict=True):
                grad_oI = spec.alpha / spec.rank * grad_OI[part.begin : part.begin + part.size]
                torch.testing.assert_close(up_or.grad, grad_oI @ down_rI.T)
                torch.testing.assert_close(down_rI.grad, up_or.T @ grad_oI)


def test_a_merged_adapter_equals_an_attached_one():
    decoder, tokens = make(CONFIG), tokens_of(9)
    adapter, merged = random_adapter(SPECS["lora"], decoder), make(CONFIG)
    merge(merged, adapter)
    expected = read(attached(decoder, adapter), tokens, "a")
    torch.testing.assert_close(logits(merged, tokens), expected, rtol=1e-4, atol=1e-4)  # summed in float32
    with pytest.raises(InvalidInput, match="a bottleneck is no change of weights"):
        merge(merged, random_adapter(Bottleneck(), merged))
    packed = Decoder(replace(CONFIG, dim=32)).pack(bits=8)
    with pytest.raises(InvalidInput, match="trainable=True"):
        merge(packed, random_adapter(LoRA(), packed))


def test_a_name_is_taken_once():
    decoder = make(CONFIG)
    attached(decoder, random_adapter(LoRA(), decoder))
    with pytest.raises(InvalidInput, match="there is an adapter 'a' already"):
        attached(decoder, random_adapter(LoRA(), decoder))


@pytest.mark.skipif(native.library() is None, reason="the kernels were not built: no C++ compiler")
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_beside_packed_weights_rows_without_an_adapter_keep_their_bits(spec):
    """Native passes read them, whatever reads the others."""
    torch.manual_seed(2)
    config = replace(CONFIG, dim=32, head_dim=8, ff_dim=64)
    decoder = Decoder(config).eval().pack(bits=8)
    dense = Decoder(config).eval()
    dense.load_state_dict(decoder.weights(), strict=False)
    dense.head.weight = dense.embedding.weight
    adapter = random_adapter(spec, dense)
    twin = twin_of(dense, adapter)
    attached(decoder, adapter)
    texts, names = [tokens_of(12, seed) for seed in range(4)], [None, "a", None, "a"]
    alone = [read(decoder, text, None) for text in texts]
    for adapters_B in (names, ["a"] * 4):
        state, found = decoder.new_state(batch_size=4, capacity=40, adapters_B=adapters_B), []
        with torch.inference_mode():
            for begin, end in ((0, 7), (7, 8), (8, 12)):
                found.append(decoder(torch.tensor([text[begin:end] for text in texts]), state)[0])
            logits_BTV = decoder.logits(torch.cat(found, dim=1))
        for row, name in enumerate(adapters_B):
            if name is None:
                assert torch.equal(logits_BTV[row], alone[row])
            else:
                expected = logits(twin, texts[row])
                assert not torch.allclose(expected, alone[row], atol=0.1)
                torch.testing.assert_close(logits_BTV[row], expected, atol=5e-3, rtol=0)  # inputs in 16 bits


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("lora", LoRA()),
        ("lora:rank=4,alpha=0.5,targets=q_proj+v_proj", LoRA(4, 0.5, ("q_proj", "v_proj"))),
        ("bottleneck:width=7", Bottleneck(7)),
    ],
)
def test_a_description_is_parsed(text, spec):
    assert parse_adapter(text) == spec


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dora", "adapter is 'dora'; expected lora or bottleneck"),
        ("lora:width=3", "adapter has 'width=3'; a lora has rank, alpha, targets"),
        ("lora:rank=many", "adapter has 'rank=many'; expected a number"),
        ("lora:rank=0", "adapter: rank is 0; expected between 1 and"),
        ("lora:alpha=nan", "adapter: alpha is nan"),
        ("lora:targets=", "adapter: targets is empty"),
    ],
)
def test_nonsense_is_refused(text, message):
    with pytest.raises(InvalidInput, match=message):
        parse_adapter(text)


def test_unknown_targets_are_refused_with_the_names_there_are():
    decoder = make(CONFIG)
    expected = (
        "targets has query; this model's linear layers are down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj,"
        " v_proj, or all-linear"
    )
    with pytest.raises(InvalidInput, match=expected):
        new_adapter(LoRA(targets=("query", "q_proj")), decoder, AdapterNames(decoder).parts)
