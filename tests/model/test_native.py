"""The native kernels against torch: weights in 8 bits, products, and decoding steps of every kind that they cover."""

import os
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memlm.base.cpu import threads
from memlm.errors import InvalidInput
from memlm.language_model import load
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import load_checkpoint, save_checkpoint
from memlm.model.kernels import native
from memlm.model.kernels.linear import Linear
from memlm.model.kernels.native_step import NativeStep
from memlm.model.kernels.quantized import (
    PLAIN_DTYPES,
    Blocks,
    BlockWeight,
    Layout,
    PanelWeight,
    PlainWeight,
    quantize_rows,
)
from memlm.model.mechanisms import RopeScaling

needs_library = pytest.mark.skipif(native.library() is None, reason="the kernels were not built: no C++ compiler")
SIZES = [(8, 32), (13, 45), (40, 64), (96, 200)]
ROWS = (1, 2, 3, 4, 5, 17, 65)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole_numbers(rows: int, columns: int) -> Tensor:
    """Inputs that 16 bits hold exactly: whole numbers, with 32,767 in each block."""
    numbers = torch.randint(-32_767, 32_768, (rows, columns), generator=torch.Generator().manual_seed(rows)).float()
    numbers[:, ::32] = 32_767
    return numbers


def weight_in(layout: Layout, outputs: int, inputs: int) -> BlockWeight:
    """A weight that uses all that a layout has: every number, and scales and minimums that differ everywhere."""
    generator, K = torch.Generator().manual_seed(9), -(-inputs // 32)
    least, most = (0, 16) if layout.bits == 4 else (-127, 128)
    numbers = torch.randint(least, most, (outputs, K, 32), generator=generator).to(torch.int8)
    numbers.flatten(1)[:, inputs:] = 0
    scales, minimums = (
        torch.randn(outputs, K, layout.num_scales, generator=generator).to(layout.scale_dtype).float() for _ in "ab"
    )
    blocks = Blocks(numbers, scales, minimums if layout.has_minimums else None)
    return BlockWeight(blocks.packed(layout), "test", outputs, inputs, layout)


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_panels_hold_all_numbers_scales_and_minimums(layout, outputs, inputs):
    weight = weight_in(layout, outputs, inputs)
    again = weight.blocks().packed(layout)
    assert torch.equal(again, weight.panels_PKB)
    assert weight.panels_PKB.shape == (-(-outputs // 8), -(-inputs // 32), layout.block_bytes)
    assert weight.to_dense().unique().numel() > 0.3 * outputs * inputs


def plain_weight(dtype: torch.dtype, outputs: int, inputs: int) -> Tensor:
    """Numbers of all magnitudes, those below the normal ones included."""
    return (random(outputs, inputs, seed=4) * torch.logspace(-7, 2, inputs)).to(dtype)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_plain_panels_hold_every_number(dtype, outputs, inputs):
    weight_OI = plain_weight(dtype, outputs, inputs)
    weight = PlainWeight.of(weight_OI)
    assert torch.equal(weight.to_dense(), weight_OI.float())
    assert (weight.kind, weight.num_bytes) == (str(dtype)[6:], 2 * (-(-outputs // 8) * 8) * (-(-inputs // 32) * 32))


def test_four_bits_are_within_half_a_unit_of_each_block():
    weight_OI = random(24, 70)
    weight_OI[3, :64] = 0.25
    rounded = BlockWeight.rounded(weight_OI, 4)
    assert (rounded.layout, rounded.kind) == (Layout.INT4, "int4")
    assert (rounded.to_dense()[3, :64] == 0.25).all()
    for begin in (0, 32, 64):
        block = weight_OI[:, begin : begin + 32]
        ends = F.pad(block, (0, 32 - block.shape[1]))  # the last block is filled up with zeros
        units = (ends.amax(dim=1) - ends.amin(dim=1)) / 15
        off = (rounded.to_dense()[:, begin : begin + 32] - block).abs().amax(dim=1)
        assert (off <= 0.5 * units * 1.02 + 2e-3).all()


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_a_rounded_weight_is_within_half_a_unit_of_each_block(outputs, inputs):
    weight_OI = random(outputs, inputs)
    weight_OI[3] = 0
    rounded = BlockWeight.rounded(weight_OI)
    assert rounded.to_dense().shape == weight_OI.shape
    assert (rounded.to_dense()[3] == 0).all()
    for output in range(outputs):
        for begin in range(0, inputs, 32):
            block, back = weight_OI[output, begin : begin + 32], rounded.to_dense()[output, begin : begin + 32]
            unit = float(block.abs().max()) / 127
            assert (back - block).abs().max() <= unit * (0.5 + 127 * 2**-11) + 1e-7  # a scale has 11 bits


@needs_library
@pytest.mark.parametrize(("outputs", "inputs"), [*SIZES, (530, 70)])
@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1.0, 1e3])
def test_weights_are_rounded_as_torch_rounds_them(outputs, inputs, scale):
    """Scales below 6e-5 are subnormal in float16, and the smallest are zero."""
    weight_OI = random(outputs, inputs) * scale
    weight_OI[2] = 0
    assert torch.equal(native.quantize(weight_OI).panels_PKB, BlockWeight.rounded(weight_OI).panels_PKB)


@needs_library
@pytest.mark.parametrize("instructions", native.instruction_sets())
@pytest.mark.parametrize("kind", [*Layout, *PLAIN_DTYPES])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_products_of_each_instruction_set_equal_those_of_torch(instructions, kind, outputs, inputs):
    is_plain = isinstance(kind, torch.dtype)
    weight = PlainWeight.of(plain_weight(kind, outputs, inputs)) if is_plain else weight_in(kind, outputs, inputs)
    bias_O = random(outputs, seed=1)
    with native.using(instructions):
        for rows in ROWS:
            x_RI = whole_numbers(rows, inputs)
            expected_RO = x_RI.double() @ weight.to_dense().double().T
            atol_RO = 1e-6 * (x_RI.double().abs() @ weight.to_dense().double().abs().T)
            got_RO = native.multiply(x_RI, weight, None)
            for product_RO in (got_RO,) if is_plain else (weight.multiply(x_RI), got_RO):
                assert ((product_RO - expected_RO).abs() <= atol_RO).all()
            torch.testing.assert_close(native.multiply(x_RI, weight, bias_O), got_RO + bias_O)
            row = native.multiply(x_RI[-1], weight, None)  # a row does not depend on those beside it
            assert torch.equal(row, got_RO[-1])


@needs_library
@pytest.mark.parametrize("instructions", native.instruction_sets())
def test_inputs_are_rounded_as_torch_rounds_them(instructions):
    weight = BlockWeight.rounded(127 * torch.eye(96))  # its scale is 1
    x_RI = random(5, 96) * torch.tensor([[1e-3], [1.0], [1e4], [0.0], [1.0]])
    values_RKi, scales_RK = quantize_rows(x_RI)
    with native.using(instructions):
        rounded_RI = native.multiply(x_RI, weight, None) / 127
    units = scales_RK.repeat_interleave(32, dim=1)
    expected_RI = (values_RKi * scales_RK[..., None]).flatten(1)
    assert (rounded_RI - expected_RI).abs().le(1e-2 * units).float().mean() > 0.99
    assert (rounded_RI - x_RI).abs().le(0.51 * units + 1e-6 * x_RI.abs()).all()


@needs_library
@pytest.mark.parametrize("instructions", native.instruction_sets())
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_row_with_a_number_that_is_not_finite_is_nan_and_no_other(instructions, bad):
    x_RI = whole_numbers(6, 64)
    x_RI[2, 40] = bad
    weight = BlockWeight.rounded(random(24, 64))
    with native.using(instructions):
        for product_RO in (native.multiply(x_RI, weight, None), weight.multiply(x_RI)):
            assert product_RO.isnan().all(dim=1).tolist() == [number == 2 for number in range(6)]


@needs_library
@pytest.mark.parametrize("instructions", native.instruction_sets())
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("tiny", [1e-28, 1e-35, 1e-40, 1e-45])
def test_blocks_of_tiny_inputs_are_no_more_than_tiny(instructions, layout, tiny):
    """As a closed gate gives them: below 1e-34, the inverse of the unit is infinite."""
    x_RI = torch.full((2, 64), tiny)
    x_RI[:, :32] = 1
    weight_OI = random(8, 64)
    weight, expected_RO = packed(weight_OI, layout), x_RI @ packed(weight_OI, layout).to_dense().T
    with native.using(instructions):
        for product_RO in (native.multiply(x_RI, weight, None), weight.multiply(x_RI)):
            torch.testing.assert_close(product_RO, expected_RO, rtol=1e-3, atol=1e-3)


@needs_library
def test_threads_share_a_product_and_callers_do_not_disturb_each_other():
    weight = BlockWeight.rounded(random(640, 640))
    inputs = [random(rows, 640, seed=rows) for rows in (1, 40, 3)]
    torch.set_num_threads(1)
    expected = [native.multiply(x_RI, weight, None) for x_RI in inputs]
    differences = list[int]()

    def repeat(number: int) -> None:
        torch.set_num_threads(3)
        for _ in range(200):
            if not torch.equal(native.multiply(inputs[number], weight, None), expected[number]):
                differences.append(number)

    callers = [threading.Thread(target=repeat, args=(number,)) for number in range(len(inputs))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert differences == []


@needs_library
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_has_threads_of_its_own():
    weight, x_RI = BlockWeight.rounded(random(640, 640)), random(4, 640)
    torch.set_num_threads(2)
    expected = native.multiply(x_RI, weight, None)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(2)
        is_equal = torch.equal(native.multiply(x_RI, weight, None), expected)
        os._exit(0 if is_equal and len(os.listdir("/proc/self/task")) > 1 else 1)
    assert os.waitpid(child, 0)[1] == 0


BASE = {"vocab_size": 60, "dim": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 72}
SHAPE = {**BASE, "context_length": 64, "head_dim": 16}
CONFIGS = {
    "llama": {},
    "multi-head": {"num_kv_heads": 4},
    "multi-query": {"num_kv_heads": 1, "head_dim": 40},
    "qwen": {"qkv_bias": True, "qk_norm": True},
    "gemma": {"norm": "rms_offset", "activation": "geglu", "embedding_scale": 7.0, "query_scale": 1.5},
    "gpt2": {"positions": "learned", "norm": "layer", "activation": "gelu", "qkv_bias": True, "out_bias": True},
    "neox": {"norm": "layer", "activation": "gelu_tanh", "parallel_residual": True, "rotary_dim": 8, "ff_bias": True},
    "relu": {"positions": "sinusoidal", "activation": "relu"},
    "no positions": {"positions": "none", "tied_embeddings": False},
    "windows": {"windows": (8, 8), "context_length": 200},
    "sinks": {"windows": (8, 8), "num_sinks": 2, "context_length": 200},
    "sinks and two angles": {"windows": (9, 5), "num_sinks": 4, "local_rope_theta": 100.0, "context_length": 200},
    "sinks without turns": {"windows": (6, 6), "num_sinks": 3, "positions": "none", "context_length": 200},
    "a local window": {"windows": (6, 0), "local_rope_theta": 100.0, "no_rope_layers": ()},
    "unturned layers": {"no_rope_layers": (1,)},
    "scaled": {"rope_scaling": RopeScaling("yarn", 4.0, original_length=16)},
}


def sampled_steps(*kinds: int | torch.dtype | Layout) -> list[Any]:
    """Every configuration in 8 bits, and one in other kinds too, by every instruction set. Of other configurations than
    that one all but one set is `exhaustive`, in turn.
    """
    cases = [*((name, 8) for name in CONFIGS), *(("llama", kind) for kind in kinds)]
    sets = native.instruction_sets()
    return [
        pytest.param(
            each, name, kind, marks=[] if name == "llama" or turn % len(sets) == place else pytest.mark.exhaustive
        )
        for turn, (name, kind) in enumerate(cases)
        for place, each in enumerate(sets)
    ]


def make(name: str, kind: int | torch.dtype | Layout = 8) -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(ModelConfig(**{**SHAPE, **CONFIGS[name]})).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.add_(torch.randn_like(parameter) * 0.3)
    if isinstance(kind, int):
        return decoder.pack(bits=kind)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.predict_from(packed(module.weight, kind))
    return decoder


def packed(weight_OI: Tensor, kind: torch.dtype | Layout) -> PanelWeight:
    if isinstance(kind, torch.dtype):
        return PlainWeight.of(weight_OI.to(kind))
    blocks = Blocks.rounded(weight_OI, kind.bits)
    return BlockWeight(blocks.packed(kind), "test", *weight_OI.shape, kind)


@needs_library
@pytest.mark.parametrize(("instructions", "name", "kind"), sampled_steps(4, *PLAIN_DTYPES))
def test_native_steps_equal_steps_in_torch(name, kind, instructions):
    """Rows of different lengths: their prompts at once, then one token at a time in one batch."""
    decoder = make(name, kind)
    assert decoder._native_step is not None
    prompts = [random(length, seed=length).abs().mul(20).long() % 60 for length in (9, 1, 17)]
    tokens_BT = torch.randint(60, (3, 24), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode(), native.using(instructions):
        states = []
        for is_native in (True, False):
            native_step = decoder._native_step
            decoder.__dict__["_native_step"] = native_step if is_native else None
            state = decoder.new_state(batch_size=3, capacity=64)
            for row, prompt in enumerate(prompts):
                single = decoder.new_state(capacity=64)
                decoder(prompt[None], single)
                state.copy_row(row, single, 0)
            states.append(state)
            decoder.__dict__["_native_step"] = native_step
        for step in range(24):
            token_B1 = tokens_BT[:, step : step + 1]
            native_step = decoder._native_step
            hidden_B1D, keys_B1D = decoder(token_B1, states[0])
            decoder.__dict__["_native_step"] = None
            expected_B1D, expected_keys_B1D = decoder(token_B1, states[1])
            decoder.__dict__["_native_step"] = native_step
            for got, expected in ((hidden_B1D, expected_B1D), (keys_B1D, expected_keys_B1D)):
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert states[0].rows == states[1].rows


# New tokens of three rows
PASSES = [(1, 9, 17), (5, 0, 1), (2, 16, 3), (0, 1, 8), (4, 4, 4), (1, 1, 1), (16, 7, 2), (1, 2, 0), (0, 0, 0)]


@needs_library
@pytest.mark.parametrize(("instructions", "name", "kind"), sampled_steps(*Layout, *PLAIN_DTYPES))
def test_a_token_has_the_same_bits_however_many_are_read_with_it(name, kind, instructions):
    """Its hidden state, key and log-probabilities, and its places in the cache: by itself, and in ragged passes."""
    decoder = make(name, kind)
    assert decoder.reads_alike
    totals = [sum(new_B) for new_B in zip(*PASSES, strict=True)]
    texts = [torch.randint(60, (total,), generator=torch.Generator().manual_seed(total)) for total in totals]
    with torch.inference_mode(), native.using(instructions), threads(2):
        batch = decoder.new_state(batch_size=3, capacity=64)
        got, done_B = [[], [], []], [0, 0, 0]
        for new_B in PASSES:
            tokens_BT = torch.full((3, max(*new_B, 1)), 59)
            for row, new in enumerate(new_B):
                tokens_BT[row, :new] = texts[row][done_B[row] : done_B[row] + new]
            hidden_BTD, keys_BTD = decoder(tokens_BT, batch, new_B=list(new_B))
            outputs = torch.cat([hidden_BTD, keys_BTD, decoder.logprobs(hidden_BTD)], dim=2)
            for row, new in enumerate(new_B):
                got[row].append(outputs[row, :new])
                assert (hidden_BTD[row, new:] == 0).all()
                done_B[row] += new
    with torch.inference_mode(), native.using(instructions), threads(1):
        for row, text in enumerate(texts):
            alone = decoder.new_state(capacity=64)
            expected = []
            for token in text:
                hidden_11D, keys_11D = decoder(token.view(1, 1), alone)
                expected.append(torch.cat([hidden_11D, keys_11D, decoder.logprobs(hidden_11D)], dim=2)[0])
            assert torch.equal(torch.cat(got[row]), torch.cat(expected))
            # A window moves at another time. What both hold is from the later base on.
            base = max(batch.rows[row].base, alone.rows[0].base)
            caches = [
                state.cache_L2BGSd[:, :, at, :, state.num_front :][
                    ..., base - state.rows[at].base : len(text) - state.rows[at].base, :
                ]
                for state, at in ((batch, row), (alone, 0))
            ]
            assert torch.equal(
                *(state.cache_L2BGSd[:, :, at, :, : batch.num_front] for state, at in ((batch, row), (alone, 0)))
            )
            assert caches[0].shape[3] >= 8
            assert torch.equal(*caches)


@needs_library
@pytest.mark.parametrize("instructions", native.instruction_sets())
@pytest.mark.parametrize("begin", [1, 3, 20])
def test_sinks_of_an_earlier_document_are_not_seen(begin, instructions):
    """The document begins before the first sink, among the sinks, and behind them."""
    decoder = make("sinks and two angles")
    text = torch.randint(60, (2, 50), generator=torch.Generator().manual_seed(begin))
    read = []
    with torch.inference_mode(), native.using(instructions):
        for step in (decoder._native_step, None):
            state = decoder.new_state(batch_size=2)
            decoder(text[:, :begin], state)
            state.begin_documents([begin, None])
            decoder.__dict__["_native_step"], kept = step, decoder._native_step
            parts = [decoder(piece, state)[0] for piece in text[:, begin:].split(7, dim=1)]
            decoder.__dict__["_native_step"] = kept
            read.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(*read, rtol=1e-3, atol=1e-3 * float(read[1].abs().max()))


@needs_library
@pytest.mark.parametrize("instructions", native.instruction_sets())
@pytest.mark.parametrize("head_dim", [8, 40, 64, 104])
def test_a_prompt_has_the_bits_of_its_tokens(head_dim, instructions):
    """More rows than go through the layers together, tiles of queries, windows that begin within blocks of places."""
    shape = {**SHAPE, "context_length": 300, "head_dim": head_dim, "windows": (37, 0), "local_rope_theta": 100.0}
    decoder = Decoder(ModelConfig(**shape)).pack(bits=8)
    tokens_BT = torch.randint(60, (2, 300), generator=torch.Generator().manual_seed(7))
    with torch.inference_mode(), native.using(instructions):
        at_once, one_by_one = (decoder.new_state(batch_size=2) for _ in range(2))
        got_BTD = torch.cat(decoder(tokens_BT, at_once), dim=2)
        parts = [torch.cat(decoder(token_B1, one_by_one), dim=2) for token_B1 in tokens_BT.split(1, dim=1)]
        assert torch.equal(got_BTD, torch.cat(parts, dim=1))
        assert torch.equal(at_once.cache_L2BGSd, one_by_one.cache_L2BGSd)
        expected_BTD = torch.cat(decoder(tokens_BT), dim=2)  # without a state: by torch
        torch.testing.assert_close(got_BTD, expected_BTD, rtol=1e-3, atol=1e-3 * float(expected_BTD.abs().max()))


@needs_library
def test_a_library_of_other_sources_is_not_used(monkeypatch, caplog):
    """An editable install whose sources were pulled, and not built again."""
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert native.library.__wrapped__() is None
    assert "install memlm again" in caplog.text


@needs_library
def test_other_models_and_steps_stay_with_torch():
    extended = {"num_sinks": 2, "windows": (8, 8), "extended_attention": 3}
    for changes in ({"positions": "alibi"}, {"norm_order": "post"}, extended, {"xl_length": 8}, {"head_dim": 12}):
        assert NativeStep.of(Decoder(ModelConfig(**{**SHAPE, **changes})).pack(bits=8)) is None, changes
    assert NativeStep.of(Decoder(ModelConfig(**SHAPE))) is None  # in float32
    assert NativeStep.of(Decoder(ModelConfig(**SHAPE)).pack(bits=8)) is not None
    assert [Decoder(ModelConfig(**SHAPE)).reads_alike, Decoder(ModelConfig(**SHAPE)).pack(bits=8).reads_alike] == [0, 1]


def test_a_model_in_8_bits_predicts_nearly_as_in_float32(model_folder, monkeypatch):
    plain, rounded = (load_checkpoint(model_folder, dtype=dtype).decoder for dtype in ("float32", "int8"))
    assert (plain.dtype_name, rounded.dtype_name) == ("float32", "int8")
    assert rounded.num_bytes < 0.35 * plain.num_bytes
    assert rounded.num_parameters == plain.num_parameters
    tokens_BT = torch.arange(30)[None] * 7 % 300
    with torch.inference_mode():
        expected = plain.logprobs(plain(tokens_BT)[0])
        with_kernels = rounded.logprobs(rounded(tokens_BT)[0])
        monkeypatch.setattr(native, "library", lambda: None)
        without = rounded.logprobs(rounded(tokens_BT)[0])
    for got in (with_kernels, without):
        assert (expected.exp() * (expected - got)).sum(dim=-1).abs().mean() < 0.01
        assert not torch.equal(got, expected)


def test_a_model_in_8_bits_generates_with_a_datastore(model_folder, store_folder):
    lm = load(model_folder, stores=[store_folder], dtype="int8")
    assert lm.info.dtype == "int8"
    tokens = list(lm.generate("memory of the", max_tokens=12, temperature=0, lam=0.4))
    assert len(tokens) == 12
    assert any(token.knn_share > 0 for token in tokens)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_rounded_weights_are_for_prediction_on_the_processor(model_folder, dtype):
    with pytest.raises(InvalidInput, match=f"{dtype}, which predicts on the processor"):
        load_checkpoint(model_folder, dtype=dtype, trainable=True)


@pytest.mark.parametrize("dtype", PLAIN_DTYPES)
def test_a_file_of_16_bits_keeps_its_numbers_and_computes_in_float32(model_folder, tmp_path, monkeypatch, dtype):
    given = load_checkpoint(model_folder, trainable=True)
    save_checkpoint(tmp_path / "narrow", given.decoder.to(dtype), given.tokenizer)
    plain = load_checkpoint(tmp_path / "narrow", dtype="float32").decoder
    tokens_BT = torch.arange(30)[None] * 7 % 300
    for is_fast, has_bfloat16 in ((True, False), (False, False), (True, True)):
        monkeypatch.setattr(native, "is_fast", lambda is_fast=is_fast: is_fast)
        monkeypatch.setattr("memlm.model.files.checkpoint.has_fast_bfloat16", lambda _, has=has_bfloat16: has)
        monkeypatch.setattr("memlm.model.device.has_fast_bfloat16", lambda _: False)
        kept = load_checkpoint(tmp_path / "narrow").decoder
        keeps = is_fast and not has_bfloat16
        assert kept.dtype_name == (str(dtype)[6:] if keeps else "float32")
        assert kept.num_bytes == pytest.approx(plain.num_bytes * (0.5 if keeps else 1), rel=0.1)
        with torch.inference_mode():
            expected, got = (decoder.logits(decoder(tokens_BT)[0]) for decoder in (plain, kept))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
