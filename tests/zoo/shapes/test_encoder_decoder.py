"""Encoder-decoders are those of `transformers` on the same weights, in any pieces and beside any rows."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import change_json
from safetensors.torch import load_file, save_file
from zoo.shapes.seq2seq_models import KINDS, Seq2SeqTwin, of_transformers, save_t5

from memlm.errors import Corrupt, Incompatible, InvalidInput
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.files.encoder_files import load_encoder, padded
from memlm.zoo.shapes.encoder_decoder import EncoderDecoder
from memlm.zoo.shapes.encoder_decoder_files import load_encoder_decoder

SOURCE_LENGTHS, LENGTH = [31, 4, 45], 33
ATOL = 1e-4  # float32, for logits of a standard deviation of 1 to 2; measured: at most 5e-5


@pytest.fixture(params=KINDS, scope="module")
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def t5(kind, tmp_path_factory) -> Path:
    return save_t5(kind, tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> EncoderDecoder:
    return load_encoder_decoder(save_t5("1.1", tmp_path_factory.mktemp("t5")), trainable=True).model.double()


def some_tokens(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 120, (length,), generator=generator).tolist() for length in lengths]


def read(model: EncoderDecoder, source: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        state = model.new_state(sources_B=model.encode(torch.tensor([source])))
        return model.logits(model(torch.tensor([tokens]), state)[0][0])


def test_states_and_logits_equal_those_of_transformers(kind, t5):
    tokens_BN, new_B = padded(some_tokens(*SOURCE_LENGTHS))
    targets_BT = torch.tensor(some_tokens(LENGTH, LENGTH, LENGTH, seed=4))
    is_text = torch.arange(max(new_B)) < torch.tensor(new_B)[:, None]
    theirs, loaded = of_transformers(t5), load_encoder_decoder(t5)
    model = loaded.model
    assert model.config.tied_embeddings == (kind not in ("1.1", "multilingual"))
    with torch.inference_mode():
        expected = theirs(tokens_BN, attention_mask=is_text.long(), decoder_input_ids=targets_BT)
        states_BND = model.encoder_states(tokens_BN, new_B)
        hidden_BTD, _ = model(targets_BT, model.new_state(batch_size=3, sources_B=model.encode(tokens_BN, new_B)))
        assert expected.logits.std() > 0.3
        torch.testing.assert_close(states_BND[is_text], expected.encoder_last_hidden_state[is_text], atol=ATOL, rtol=0)
        torch.testing.assert_close(model.logits(hidden_BTD), expected.logits, atol=ATOL, rtol=0)
    assert (loaded.start_id, loaded.end_ids) == (0, (1,))


@pytest.mark.parametrize("kind", ["1.0", "1.1"], indirect=True)
def test_it_equals_its_float64_twin(kind, t5):
    model, (source, tokens) = load_encoder_decoder(t5, trainable=True).model.double(), some_tokens(26, 30)
    twin = Seq2SeqTwin(model)
    with torch.inference_mode():
        np.testing.assert_allclose(model.encoder_states(torch.tensor([source]))[0], twin.encoded(source), atol=1e-9)
    np.testing.assert_allclose(read(model, source, tokens), twin.logits(source, tokens), atol=1e-9)


@pytest.mark.parametrize("pieces", [[1] * 12, [5, 1, 2, 4]], ids=["by token", "uneven"])
def test_the_pieces_of_the_decoders_text_change_nothing(small, pieces):
    source, tokens = some_tokens(9, 12)
    state, begin, got = small.new_state(sources_B=small.encode(torch.tensor([source]))), 0, []
    with torch.inference_mode():
        for piece in pieces:
            got.append(small.logits(small(torch.tensor([tokens[begin : begin + piece]]), state)[0][0]))
            begin += piece
    torch.testing.assert_close(torch.cat(got), read(small, source, tokens), atol=1e-10, rtol=0)


def test_padding_of_a_source_and_other_rows_change_nothing(small):
    sources, rows = some_tokens(*SOURCE_LENGTHS), some_tokens(8, 8, 8, seed=4)
    tokens_BN, new_B = padded(sources)
    for filled in (tokens_BN, torch.where(torch.arange(45) < torch.tensor(new_B)[:, None], tokens_BN, 7)):
        with torch.inference_mode():
            state = small.new_state(batch_size=3, sources_B=small.encode(filled, new_B))
            together = small.logits(small(torch.tensor(rows), state)[0])
        for got, source, row in zip(together, sources, rows, strict=True):
            torch.testing.assert_close(got, read(small, source, row), atol=1e-10, rtol=0)


def test_a_changed_token_of_the_source_changes_the_logits_of_every_token(small):
    source, tokens = some_tokens(9, 12)
    for place in (0, 8):
        other = [*source[:place], source[place] + 1 - 2 * (source[place] == 119), *source[place + 1 :]]
        change_T = (read(small, source, tokens) - read(small, other, tokens)).abs().amax(dim=1)
        assert change_T.min() > 1e-4


def test_the_source_is_encoded_once_a_text(small, monkeypatch):
    source, tokens = some_tokens(9, 6)
    state, calls = small.new_state(sources_B=small.encode(torch.tensor([source]))), []
    for module in (small.encoder, *(block.cross.key_value for block in small.blocks)):
        monkeypatch.setattr(module, "forward", lambda *given: calls.append(given))
    for token in tokens:
        small(torch.tensor([[token]]), state)
    assert not calls


def test_loss_reaches_every_parameter_of_both_sides(small):
    sources_BN, targets_BT = torch.tensor(some_tokens(30, 30)), torch.tensor(some_tokens(40, 40, seed=4))
    small.zero_grad()
    state = small.new_state(batch_size=2, sources_B=small.encode(sources_BN))
    hidden_BTD, _ = small(targets_BT[:, :-1], state)
    torch.nn.functional.cross_entropy(small.logits(hidden_BTD).flatten(0, 1), targets_BT[:, 1:].flatten()).backward()
    for name, parameter in small.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_a_shared_head_that_old_files_hold_twice_is_shared(tmp_path):
    folder = save_t5("1.0", tmp_path / "t5")
    weights, (source, tokens) = load_file(folder / "model.safetensors"), some_tokens(9, 12)
    expected = read(load_encoder_decoder(folder).model, source, tokens)
    copies = ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
    unused = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.randn(12, 4)}
    shared = {name: weights["shared.weight"].clone() for name in copies}
    save_file({**weights, **shared, **unused}, folder / "model.safetensors")
    model = load_encoder_decoder(folder).model
    assert model.config.tied_embeddings
    assert torch.equal(read(model, source, tokens), expected)


def test_an_old_config_of_version_1_1_scales_nothing(tmp_path):
    folder, (source, tokens) = save_t5("1.1", tmp_path / "t5"), some_tokens(9, 12)
    expected = read(load_encoder_decoder(folder).model, source, tokens)
    config = json.loads((folder / "config.json").read_text())
    del config["scale_decoder_outputs"]
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert torch.equal(read(load_encoder_decoder(folder).model, source, tokens), expected)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_rounded_weights_are_nearly_the_same_model(tmp_path, dtype):
    folder, (source, tokens) = save_t5("1.1", tmp_path / "t5"), some_tokens(9, 12)
    models = [load_encoder_decoder(folder, dtype=each).model for each in ("float32", dtype)]
    exact, rounded = (read(model, source, tokens) for model in models)
    assert 0 < (exact - rounded).abs().mean() < 0.05 * exact.std()


def test_what_does_not_fit_is_refused_in_words(tmp_path, small):
    folder = save_t5("1.0", tmp_path / "t5")
    with pytest.raises(Incompatible, match=r"encoder-decoder, which answers a source.*memlm.Seq2Seq.load"):
        load_checkpoint(folder)
    with pytest.raises(Incompatible, match="the encoders that this version reads are bert"):
        load_encoder(folder)
    short = load_encoder_decoder(folder, context_length=10).model
    with pytest.raises(InvalidInput, match="11 tokens of a source do not fit into the 10 places"):
        short.encode(torch.tensor([[5] * 11]))
    with pytest.raises(InvalidInput, match="expected 1 to 3 each"):
        small.encode(torch.tensor([[5, 6, 7]] * 2), [3, 0])
    with pytest.raises(InvalidInput, match="has no source"):
        small(torch.tensor([[5]]))
    changes = ({"positions": "rotary"}, "has 't5'"), ({"cross": None}, "reads no source"), ({"join": "gated"}, "plain")
    for change, message in changes:
        with pytest.raises(InvalidInput, match=message):
            EncoderDecoder(replace(small.config, **change))
    change_json(folder / "config.json", feed_forward_proj="gated-relu")
    with pytest.raises(Incompatible, match="expected relu, gated-gelu or gated-silu"):
        load_encoder_decoder(folder)
    change_json(folder / "config.json", feed_forward_proj="relu", model_type="umt5")
    with pytest.raises(Incompatible, match="the encoder-decoders that this version reads are t5, mt5"):
        load_encoder_decoder(folder)
    change_json(folder / "config.json", model_type="t5", vocab_size=9)
    with pytest.raises(Corrupt, match="tokens in the tokenizer"):
        load_encoder_decoder(folder)
