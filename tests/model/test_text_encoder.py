"""Encoders read whole texts, and are those of `transformers` on the same weights."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import KINDS, SHAPE, EncoderTwin, change_json, encoder_tokenizer, make_encoder, save_bert
from other_families import save_as_others_do
from safetensors.torch import load_file, save_file

from memlm.data.encoder_tokenizer import EncoderTokenizer
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound
from memlm.model.attention.mask import AttentionMask
from memlm.model.attention.watch import Watch
from memlm.model.files.checkpoint import load_checkpoint
from memlm.model.files.encoder_files import load_encoder, padded
from memlm.model.kernels import cpu
from memlm.model.text_encoder import TextEncoder

ATOL = 1e-5  # float32; measured: at most 2e-6 for hidden states, for logits of a standard deviation of 1.5


def some_rows(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(params=KINDS, scope="module")
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def bert(kind, tmp_path_factory) -> Path:
    return save_bert(kind, tmp_path_factory.mktemp("bert"))


def test_it_equals_its_float64_twin():
    encoder, (tokens,) = make_encoder(), some_rows(17)
    segments = [0] * 6 + [1] * 11
    with torch.inference_mode():
        hidden_TD = encoder(torch.tensor([tokens]), segments_BT=torch.tensor([segments]))[0]
        logits_TV = encoder.logits(hidden_TD)
    twin = EncoderTwin(encoder)
    np.testing.assert_allclose(hidden_TD, twin.hidden(tokens, segments), atol=1e-10)
    np.testing.assert_allclose(logits_TV, twin.logits(tokens, segments), atol=1e-9)
    assert logits_TV.std() > 0.5


def test_padding_and_other_rows_change_nothing():
    encoder, rows = make_encoder(), some_rows(17, 5, 1, 24)
    tokens_BT, new_B = padded(rows)
    with torch.inference_mode():
        together = encoder(tokens_BT, new_B)
        others = encoder(torch.where(tokens_BT == 0, 7, tokens_BT), new_B)
        for row, tokens in enumerate(rows):
            alone_TD = encoder(torch.tensor([tokens]))[0]
            torch.testing.assert_close(together[row, : len(tokens)], alone_TD, atol=1e-12, rtol=0)
            if 0 not in tokens:
                assert torch.equal(others[row, : len(tokens)], together[row, : len(tokens)])


def test_tokens_see_what_comes_after_them():
    encoder, (tokens,) = make_encoder(), some_rows(12)
    changed = [*tokens[:-1], (tokens[-1] + 1) % 40]
    with torch.inference_mode():
        first, second = (encoder(torch.tensor([each]))[0, 0] for each in (tokens, changed))
    assert (first - second).abs().max() > 1e-3


def test_a_watch_sees_weights_on_all_places():
    seen = {}

    class Recorder(Watch):
        def weights(self, layer, weights_BHTE, mask):
            seen[layer] = weights_BHTE

        def heads(self, layer, mixed_BHTd):
            return mixed_BHTd

    encoder, rows = make_encoder(), some_rows(9, 6)
    tokens_BT, new_B = padded(rows)
    with torch.inference_mode():
        watched = encoder(tokens_BT, new_B, watch=Recorder())
        torch.testing.assert_close(watched, encoder(tokens_BT, new_B))
    assert (seen[1][0] > 0).all()
    assert (seen[1][1, :, :, :6] > 0).all()
    assert not seen[1][1, :, :, 6:].any()


@pytest.mark.parametrize("lengths", [[11, 11], [11, 4]])
def test_attention_in_blocks_sees_all_of_a_text(monkeypatch, lengths):
    monkeypatch.setattr(cpu, "QUERY_BLOCK", 4)
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 11, 8)
    mask = AttentionMask.bidirectional(lengths, 11, query.device)
    in_blocks, plain = (kernel(query, key, value, mask, 0) for kernel in (cpu.sdpa_in_blocks, cpu.plain_sdpa))
    for row, length in enumerate(lengths):
        scores = query[row] @ key[row, :, :length].mT / 8**0.5
        expected = scores.softmax(-1) @ value[row, :, :length]
        torch.testing.assert_close(plain[row], expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(in_blocks[row], expected, atol=1e-5, rtol=1e-5)


def test_hidden_states_and_logits_equal_those_of_transformers(kind, bert):
    rows = some_rows(40, 7, 64, 23)
    tokens_BT, new_B = padded(rows)
    attention_mask = (torch.arange(64) < torch.tensor(new_B)[:, None]).long()
    segments_BT = (torch.arange(64) > 5).long().expand(4, -1)
    theirs = KINDS[kind][0].from_pretrained(bert, attn_implementation="eager").eval()
    encoder = load_encoder(bert).encoder
    with torch.inference_mode():
        options = {"attention_mask": attention_mask, "token_type_ids": segments_BT, "output_hidden_states": True}
        expected = theirs(tokens_BT, **options)
        hidden_BTD = encoder(tokens_BT, new_B, segments_BT=segments_BT)
        plain_BTD = encoder(tokens_BT, new_B)
        is_text = attention_mask.bool()
        torch.testing.assert_close(hidden_BTD[is_text], expected.hidden_states[-1][is_text], atol=ATOL, rtol=0)
        of_one = theirs(tokens_BT, attention_mask=attention_mask, output_hidden_states=True).hidden_states[-1]
        torch.testing.assert_close(plain_BTD[is_text], of_one[is_text], atol=ATOL, rtol=0)
        if kind != "no head":
            logits = expected.prediction_logits if kind == "pretraining" else expected.logits
            assert logits.std() > 1
            torch.testing.assert_close(encoder.logits(hidden_BTD)[is_text], logits[is_text], atol=10 * ATOL, rtol=0)


def test_names_of_old_files_are_read(tmp_path):
    folder, tokens_BT = save_bert("masked", tmp_path / "bert"), torch.tensor(some_rows(20))
    expected = load_encoder(folder).encoder(tokens_BT)
    weights = load_file(folder / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        weights = {each.replace(new, name): tensor for each, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors")
    assert torch.equal(load_encoder(folder).encoder(tokens_BT), expected)


def test_rounded_and_trainable_weights_are_the_same_model(tmp_path):
    folder, tokens_BT = save_bert("masked", tmp_path / "bert"), torch.tensor(some_rows(20))
    packed, plain = load_encoder(folder).encoder, load_encoder(folder, trainable=True).encoder
    rounded = load_encoder(folder, dtype="int8").encoder
    assert plain(tokens_BT).requires_grad
    plain.logits(plain(tokens_BT)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in plain.parameters())
    with torch.inference_mode():
        torch.testing.assert_close(packed(tokens_BT), plain(tokens_BT), atol=1e-5, rtol=0)
        assert 1e-4 < (rounded(tokens_BT) - plain(tokens_BT)).square().mean().sqrt() < 0.05


def test_vectors_are_means_or_the_first_state_and_follow_the_files(tmp_path):
    folder = save_bert("no head", tmp_path / "bert")
    mean, texts = load_encoder(folder), ["the memory", "the page of the model, and more", ""]
    change_json(folder / "1_Pooling/config.json", pooling_mode_cls_token=True, pooling_mode_mean_tokens=False)
    change_json(folder / "sentence_bert_config.json", max_seq_length=7)
    first = load_encoder(folder)
    assert (mean.pooling, mean.max_tokens, first.pooling, first.max_tokens) == ("mean", 64, "first", 7)
    assert mean.fingerprint != first.fingerprint
    for place, text in enumerate(texts):
        for checkpoint in (mean, first):
            (ids,) = checkpoint.tokenizer.encode([text], most=checkpoint.max_tokens)
            with torch.inference_mode():
                states = checkpoint.encoder(torch.tensor([ids]))[0]
            expected = states.mean(dim=0) if checkpoint is mean else states[0]
            got = checkpoint.vectors(texts)[place]
            np.testing.assert_allclose(got, expected / expected.norm(), atol=1e-6)


def test_on_a_cpu_a_vector_depends_on_no_other_text(tmp_path):
    """To the last bit: a deleted document leaves no trace in the vectors of others."""
    encoder = load_encoder(save_bert("no head", tmp_path / "bert"), dtype="float32")
    texts = [("the page of the model " * (number % 8 + 1)).strip() for number in range(24)]
    alone = [encoder.vectors([text])[0] for text in texts]
    assert encoder.vectors(texts).tobytes() == np.stack(alone).tobytes()


@pytest.mark.parametrize(
    ("file", "changes", "says"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ("config.json", {"model_type": "roberta"}, "'roberta'.*bert"),
        ("config.json", {"is_decoder": True}, "is_decoder"),
        ("config.json", {"tie_word_embeddings": False}, "tie_word_embeddings"),
        ("config.json", {"hidden_act": "silu"}, "silu"),
        ("config.json", {"position_embedding_type": "relative_key"}, "relative_key"),
    ],
)
def test_what_this_version_lacks_is_refused_by_name(tmp_path, file, changes, says):
    folder = save_bert("masked", tmp_path / "bert")
    change_json(folder / file, **changes)
    with pytest.raises(Incompatible, match=says):
        load_encoder(folder)


def test_modules_behind_the_encoder_are_refused_by_name(tmp_path):
    folder = save_bert("masked", tmp_path / "bert")
    modules = [{"type": f"sentence_transformers.models.{name}"} for name in ("Transformer", "Pooling", "Dense")]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Incompatible, match="Dense"):
        load_encoder(folder)


def test_encoders_and_decoders_are_not_taken_for_each_other(tmp_path, tokenizer):
    folder = save_bert("masked", tmp_path / "bert")
    with pytest.raises(Incompatible, match="passage_encoder"):
        load_checkpoint(folder)
    with pytest.raises(Incompatible, match="'gpt2'"):
        load_encoder(save_as_others_do("gpt2", tmp_path / "gpt2", tokenizer))


def test_damaged_folders_are_refused(tmp_path):
    folder = save_bert("masked", tmp_path / "bert")
    weights = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in weights.items() if "layer.1.output.dense.bias" not in n}, folder / "model.safetensors")
    with pytest.raises(Corrupt, match=r"layer\.1\.output\.dense\.bias"):
        load_encoder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(NotFound, match=r"vocab\.txt"):
        load_encoder(folder)


def test_texts_that_do_not_fit_are_refused():
    encoder = make_encoder()
    for tokens_BT, new_B in (
        (torch.zeros(1, 25, dtype=torch.int64), None),
        (torch.zeros(2, 5, dtype=torch.int64), [5, 0]),
        (torch.zeros(1, 5, dtype=torch.int64), [6]),
    ):
        with pytest.raises(InvalidInput):
            encoder(tokens_BT, new_B)
    with pytest.raises(InvalidInput, match="head"):
        make_encoder(replace(SHAPE, tied_embeddings=False), has_head=False).logits(torch.zeros(1, 16))


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "rotary"},
        {"tied_embeddings": False},
        {"norm_order": "pre"},
        {"windows": (3, 3)},
        {"layers": ({"channel": "hash"},)},
    ],
)
def test_configs_that_an_encoder_cannot_have_are_refused(changes):
    with pytest.raises(InvalidInput, match=next(iter(changes))):
        TextEncoder(replace(SHAPE, **changes))


def test_special_tokens_in_a_text_are_text_and_long_texts_keep_the_template():
    tokenizer = encoder_tokenizer()
    (ids,) = tokenizer.encode(["the [MASK] page"], most=64)
    assert [each for each in ids if each in tokenizer.special_ids] == [ids[0], ids[-1]]
    short, long = tokenizer.encode(["the", "the page " * 50], most=9)
    assert (len(long), long[0], long[-1]) == (9, short[0], short[-1])
    with pytest.raises(InvalidInput, match="261"):
        EncoderTokenizer.train(["text"], vocab_size=260)
