import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram
from tokenizers.trainers import BpeTrainer
from transformers.convert_slow_tokenizer import TikTokenConverter

from memlm.data import long_texts
from memlm.data import tokenizer as tokenizer_module
from memlm.data.tokenizer import END_OF_TEXT, Tokenizer

WORDS = ["the", "memory", "of", "gates", "don't", "e\u0301te\u0301", "x=1;", "猫", "2026", "(a)", "...", "ﬁn", "ⅷ"]
SPACES = [" ", " ", " ", "\n", "\n\n", "  ", "\t", "\r\n", ""]
BYTES = [f"<0x{number:02X}>" for number in range(256)]
texts = st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(SPACES)), max_size=120).map(
    lambda pairs: "".join(word + space for word, space in pairs)
)


def byte_level(*before, prefix: bool = False, pattern: str | None = None, normalizer=None) -> Tokenizer:
    backend = tokenizers.Tokenizer(BPE())
    last = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=pattern is None)
    splits = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*before, *splits, last])
    backend.decoder = decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    trainer = BpeTrainer(
        vocab_size=500, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([f"{one} {other}\n{one}.\n\n" for one in WORDS for other in WORDS], trainer)
    return Tokenizer(backend)


def sentencepiece(**parts) -> Tokenizer:
    trained = tokenizers.Tokenizer(BPE())
    trainer = BpeTrainer(vocab_size=600, special_tokens=["<unk>", END_OF_TEXT, *BYTES], show_progress=False)
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([f"{one} {other}\n{one}." for one in WORDS for other in WORDS], trainer)
    model = json.loads(trained.model.__getstate__())
    merges = [tuple(pair) for pair in model["merges"]]
    backend = tokenizers.Tokenizer(BPE(model["vocab"], merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.add_special_tokens([END_OF_TEXT])
    for name, part in parts.items():
        setattr(backend, name, part)
    return Tokenizer(backend)


def unigram() -> Tokenizer:
    words = [("▁" + word, -2.0 - place) for place, word in enumerate(WORDS)]
    letters = [(letter, -9.0) for letter in sorted({*"".join(WORDS), "▁"})]
    pieces = [("<unk>", 0.0), (END_OF_TEXT, 0.0), *((byte, -20.0) for byte in BYTES), *words, *letters]
    backend = tokenizers.Tokenizer(Unigram(pieces, 0, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Prepend("▁"), _spaced()])
    return Tokenizer(backend)


def _spaced() -> normalizers.Replace:
    return normalizers.Replace(" ", "▁")


KINDS = {
    "GPT-2": byte_level,
    "Llama 3": lambda: byte_level(pattern=TikTokenConverter("").pattern),
    "SmolLM": lambda: byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "Qwen": lambda: byte_level(pattern=TikTokenConverter("").pattern, normalizer=normalizers.NFC()),
    "a space before every text": lambda: byte_level(prefix=True),
    "Llama 2": lambda: sentencepiece(normalizer=normalizers.Sequence([normalizers.Prepend("▁"), _spaced()])),
    "Gemma": lambda: sentencepiece(normalizer=_spaced()),
    "Metaspace": lambda: sentencepiece(pre_tokenizer=pre_tokenizers.Metaspace()),
    "T5": unigram,
}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "PIECE_CHARACTERS", 20)


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Tokenizer:
    return KINDS[request.param]()


@settings(max_examples=30)
@given(text=texts)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind, text):
    (whole,) = kind._encoded([text])
    assert long_texts.encode_in_pieces(text, kind._encoded, drops_space=kind.prepends_space).tolist() == whole.tolist()


def test_a_vocabulary_whose_tokens_hold_several_words_gets_texts_whole(monkeypatch):
    backend = tokenizers.Tokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = BpeTrainer(
        vocab_size=300, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    backend.train_from_iterator([" yes" * 40] * 40, trainer)
    tokenizer, text = Tokenizer(backend), "abcd" + " yes" * 500
    monkeypatch.setattr(tokenizer_module, "PIECE_CHARACTERS", 20)
    (whole,) = tokenizer._encoded([text])
    assert tokenizer.encode(text).tolist() == whole.tolist()
    assert long_texts.encode_in_pieces(text, tokenizer._encoded, drops_space=False).tolist() != whole.tolist()


def test_a_text_of_words_is_cut_everywhere_and_one_without_seams_nowhere(kind):
    cuts = lambda text: [*long_texts._bounds_of(text, kind._encoded, drops_space=kind.prepends_space)]  # noqa: E731
    words = "the memory of gates " * 40
    assert len(cuts(words)) > len(words) / 20 / 2
    assert cuts("x" * 500) == [0]
