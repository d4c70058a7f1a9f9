import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlm.data.tokenizer import END_OF_TEXT, Tokenizer
from memlm.errors import Corrupt, Incompatible, InvalidInput, NotFound

UNICODE = st.text(st.characters(exclude_categories=["Cs"]))


@given(text=UNICODE)
def test_the_bytes_of_a_texts_tokens_are_the_text(tokenizer, text):
    ids = tokenizer.encode(text).tolist()
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert tokenizer.decode(ids) == text


def test_the_special_token_written_out_is_ordinary_text(tokenizer):
    ids = tokenizer.encode(f"a{END_OF_TEXT}b").tolist()
    assert tokenizer.end_id not in ids
    assert tokenizer.decode(ids) == f"a{END_OF_TEXT}b"


def test_it_is_the_same_after_saving_and_loading(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.fingerprint == tokenizer.fingerprint
    assert again.encode("the memory é").tolist() == tokenizer.encode("the memory é").tolist()


def test_batches_encode_like_single_texts(tokenizer):
    texts = ["the memory", "", "é 猫"]
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert ids.tolist() == tokenizer.encode(text).tolist()


def test_newlines_are_counted_by_token(tokenizer):
    ids = tokenizer.encode("a\nb\n\nc")
    assert tokenizer.newlines[ids].sum() == 3
    assert tokenizer.newlines.dtype == np.int64


def test_half_a_surrogate_pair_is_refused(tokenizer):
    with pytest.raises(InvalidInput, match="character 1"):
        tokenizer.encode("a\ud800")


def test_ids_outside_the_vocabulary_are_refused(tokenizer):
    for bad in (-1, tokenizer.vocab_size):
        with pytest.raises(InvalidInput, match="outside the vocabulary"):
            tokenizer.decode([bad])


def test_a_missing_a_broken_and_a_foreign_file_are_told_apart(tmp_path):
    with pytest.raises(NotFound):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Corrupt):
        Tokenizer.load(tmp_path)
    word_level = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(word_level))
    with pytest.raises(Incompatible, match="byte-level BPE"):
        Tokenizer.load(tmp_path)
