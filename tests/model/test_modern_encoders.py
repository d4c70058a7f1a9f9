"""ModernBERT, cross-encoders and dense layers compute what `transformers` and sentence-transformers do on the same
weights.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from encoders import (
    CROSS_KINDS,
    MODERN_KINDS,
    change_json,
    encoder_tokenizer,
    save_bert,
    save_cross_encoder,
    save_modernbert,
)
from safetensors.torch import save_file

from memlm.data.encoder_tokenizer import longest_first
from memlm.errors import Corrupt, Incompatible, NotFound
from memlm.model.files.cross_encoder_files import load_cross_encoder
from memlm.model.files.encoder_files import load_encoder, padded

ATOL = 1e-5  # float32; measured: at most 3e-6, for hidden states of a standard deviation of 1.1
TEXTS = ["the memory of the page", "of", "the page of the model and the memory " * 6]


def some_rows(*lengths: int, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(40, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("kind", MODERN_KINDS)
def test_hidden_states_of_modernbert_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Beyond the local window, with padding, and alone."""
    folder, rows = save_modernbert(kind, tmp_path / "modern"), some_rows(40, 7, 1, 100, 4)
    tokens_BT, new_B = padded(rows)
    is_text = torch.arange(100) < torch.tensor(new_B)[:, None]
    theirs = transformers.ModernBertModel.from_pretrained(folder, attn_implementation="eager").eval()
    encoder = load_encoder(folder).encoder
    with torch.inference_mode():
        expected = theirs(tokens_BT, attention_mask=is_text.long()).last_hidden_state
        together = encoder(tokens_BT, new_B)
        assert expected.std() > 0.5
        assert not together.isnan().any()
        torch.testing.assert_close(together[is_text], expected[is_text], atol=ATOL, rtol=0)
        for row, tokens in enumerate(rows):
            alone = encoder(torch.tensor([tokens]))[0]
            torch.testing.assert_close(alone, expected[row, : len(tokens)], atol=ATOL, rtol=0)


def test_a_local_layer_sees_both_sides_of_its_window_and_no_more(tmp_path: Path) -> None:
    """Of two layers, the first global, the second local: what changes beyond its window comes through the first."""
    folder = tmp_path / "modern"
    config = transformers.ModernBertConfig(
        vocab_size=300, hidden_size=48, intermediate_size=64, num_attention_heads=4,
        num_hidden_layers=1, layer_types=["sliding_attention"], local_attention=8, max_position_embeddings=128,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    transformers.ModernBertModel(config).save_pretrained(folder)
    encoder_tokenizer().save(folder)
    encoder, (tokens,) = load_encoder(folder).encoder, some_rows(40)
    changed = [*tokens[:20], (tokens[20] + 1) % 40, *tokens[21:]]
    with torch.inference_mode():
        first, second = (encoder(torch.tensor([each]))[0] for each in (tokens, changed))
    moved = (first - second).abs().amax(dim=1) > 1e-6
    assert moved.nonzero()[:, 0].tolist() == list(range(16, 25))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_activation": "relu"}, "relu"),
        ({"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}, "rope_type"),
    ],
)
def test_what_this_version_lacks_of_modernbert_is_refused_by_name(tmp_path: Path, changes: dict, says: str) -> None:
    folder = save_modernbert("plain", tmp_path / "modern")
    change_json(folder / "config.json", **changes)
    with pytest.raises(Incompatible, match=says):
        load_encoder(folder)


def test_settings_under_their_older_names_are_read(tmp_path: Path) -> None:
    folder, tokens_BT = save_modernbert("plain", tmp_path / "modern"), torch.tensor(some_rows(60))
    change_json(
        folder / "config.json",
        rope_parameters={"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 1e4}},
    )
    expected = load_encoder(folder).encoder(tokens_BT)
    change_json(folder / "config.json", rope_parameters=None, layer_types=None, global_rope_theta=5e5)
    change_json(folder / "config.json", local_rope_theta=1e4, global_attn_every_n_layers=3)
    assert torch.equal(load_encoder(folder).encoder(tokens_BT), expected)


def save_dense(
    folder: Path, number: int, out: int, inner: int, activation: str, *, bias: bool
) -> dict[str, torch.Tensor]:
    """Writes a dense layer as sentence-transformers does."""
    path = folder / f"{number}_Dense"
    path.mkdir()
    tensors = {"linear.weight": torch.randn(out, inner) / inner**0.5}
    tensors |= {"linear.bias": torch.randn(out)} if bias else {}
    save_file(tensors, path / "model.safetensors")
    settings = {"in_features": inner, "out_features": out, "bias": bias}
    change_json(path / "config.json", **settings, activation_function=f"torch.nn.modules.{activation}")
    return tensors


def list_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {"idx": number, "name": str(number), "path": f"{number}_{kind}", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_pass_the_dense_layers_of_sentence_transformers(tmp_path: Path, pooling: str) -> None:
    folder = save_modernbert("plain", tmp_path / "modern")
    torch.manual_seed(2)
    first = save_dense(folder, 2, 30, 48, "activation.Tanh", bias=True)
    second = save_dense(folder, 3, 12, 30, "linear.Identity", bias=False)
    list_modules(folder, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    change_json(
        folder / "1_Pooling/config.json",
        pooling_mode_cls_token=pooling == "cls",
        pooling_mode_mean_tokens=pooling == "mean",
    )
    checkpoint, plain = load_encoder(folder), save_modernbert("plain", tmp_path / "plain")
    theirs = transformers.ModernBertModel.from_pretrained(plain, attn_implementation="eager").eval()
    got = checkpoint.vectors(TEXTS)
    assert (checkpoint.dim, got.shape) == (12, (3, 12))
    assert checkpoint.fingerprint != load_encoder(plain).fingerprint
    for place, ids in enumerate(checkpoint.tokenizer.encode(TEXTS, most=128)):
        with torch.inference_mode():
            hidden_TD = theirs(torch.tensor([ids])).last_hidden_state[0]
        pooled_D = hidden_TD[0] if pooling == "cls" else hidden_TD.mean(dim=0)
        inner = torch.tanh(first["linear.weight"] @ pooled_D + first["linear.bias"])
        expected = second["linear.weight"] @ inner
        np.testing.assert_allclose(got[place], expected / expected.norm(), atol=ATOL)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"activation_function": "torch.nn.modules.activation.SELU"}, Incompatible, "SELU"),
        ({"use_residual": True}, Incompatible, "use_residual"),
        ({"module_input_name": "token_embeddings"}, Incompatible, "module_input_name"),
        ({"bias": False}, Corrupt, r"linear\.bias"),
    ],
)
def test_dense_layers_that_are_not_as_expected_are_refused(tmp_path, changes: dict, error: type, says: str) -> None:
    folder = save_bert("no head", tmp_path / "bert")
    save_dense(folder, 2, 12, 48, "activation.Tanh", bias=True)
    list_modules(folder, "Transformer", "Pooling", "Dense")
    change_json(folder / "2_Dense/config.json", **changes)
    with pytest.raises(error, match=says):
        load_encoder(folder)


def test_a_dense_layer_of_another_width_is_refused(tmp_path: Path) -> None:
    folder = save_bert("no head", tmp_path / "bert")
    save_dense(folder, 2, 12, 40, "activation.Tanh", bias=True)
    list_modules(folder, "Transformer", "Pooling", "Dense")
    with pytest.raises(Corrupt, match="48"):
        load_encoder(folder)


@pytest.mark.parametrize("kind", CROSS_KINDS)
def test_scores_of_a_cross_encoder_equal_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """The pairs are those that the tokenizer of transformers makes, the cut ones too."""
    folder = save_cross_encoder(kind, tmp_path / "cross")
    checkpoint, most = load_cross_encoder(folder), 64 if kind == "bert" else 128
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), model_max_length=most)
    theirs = CROSS_KINDS[kind][0].from_pretrained(folder, attn_implementation="eager").eval()
    for query in ("the page", TEXTS[2] * 9):
        pairs = checkpoint.encode(query, TEXTS)
        expected = []
        for text, (ids, segments) in zip(TEXTS, pairs, strict=True):
            inputs = fast(query, text, truncation="longest_first", return_tensors="pt", return_token_type_ids=True)
            assert inputs["input_ids"][0].tolist() == ids
            assert inputs["token_type_ids"][0].tolist() == segments
            if kind != "bert":
                del inputs["token_type_ids"]
            with torch.inference_mode():
                expected.append(theirs(**inputs).logits[0, 0].sigmoid())
        got = checkpoint.scores(pairs)
        np.testing.assert_allclose(got, expected, atol=ATOL)
        assert got.std() > 1e-3


def test_a_pair_is_cut_as_the_tokenizers_library_cuts_it() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    for room in range(1, 9):
        library.enable_truncation(room, strategy="longest_first")
        for first in range(9):
            for second in range(9):
                ids = library.encode("a " * first, "a " * second)
                assert longest_first(first, second, room) == (ids.type_ids.count(0), ids.type_ids.count(1))


def test_encoders_and_cross_encoders_are_not_taken_for_each_other(tmp_path: Path) -> None:
    cross, plain = save_cross_encoder("bert", tmp_path / "cross"), save_bert("no head", tmp_path / "plain")
    with pytest.raises(Incompatible, match="reranker"):
        load_encoder(cross)
    with pytest.raises(Incompatible, match="passage_encoder"):
        load_cross_encoder(plain)
    with pytest.raises(Incompatible, match="3 scores"):
        load_cross_encoder(save_cross_encoder("bert", tmp_path / "three", num_labels=3))
    with pytest.raises(NotFound, match="nothing"):
        load_cross_encoder(tmp_path / "nothing")


def test_a_cross_encoder_whose_files_changed_is_refused(tmp_path: Path) -> None:
    checkpoint = load_cross_encoder(save_cross_encoder("bert", tmp_path / "cross"))
    save_cross_encoder("bert", tmp_path / "cross", seed=8)
    with pytest.raises(Incompatible, match="changed after the reranker was loaded"):
        _ = checkpoint.fingerprint
