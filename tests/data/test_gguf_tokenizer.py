"""Tokenizers of GGUF files give the ids of `transformers`, on lines of real text where there is some."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from texts import make_text
from tokenizers import Regex, pre_tokenizers
from tokenizers.models import BPE, Unigram
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from memlm.data.gguf_tokenizer import tokenizer_of
from memlm.data.tokenizer import Tokenizer
from memlm.errors import Corrupt, Incompatible

SHARED = Path(__file__).parents[3] / "shared"
HARD = [
    "café 12345 ½ 日本語 \u200b  x\r\n\r\n  y", "'s don't I'LL we'Ve", "   leading", "tab\tx\n\n\n",
    "🙂🙂 emoji", "", " ",
    "e\u0301 and \ufb01", "1,234.56 + 7%", "<|endoftext|>", "x" * 300, "\n \n  \n", "\u00a0nbsp\u3000wide", "ß ẞ",
]  # fmt: skip


@pytest.fixture(scope="module")
def lines() -> list[str]:
    """10,000 lines: of the Isabelle theories where the data lies beside the project, else made up."""
    texts = SHARED / "data" / "isabelle" / "test.jsonl.gz"
    if not texts.is_file():
        return HARD + [make_text(number, 12) for number in range(10_000 - len(HARD))]
    with gzip.open(texts, "rt") as file:
        found = [line for document in file for line in json.loads(document)["text"].split("\n")]
    return HARD + [line for line in found if line.strip()][: 10_000 - len(HARD)]


@pytest.fixture(scope="module")
def byte_level(lines) -> dict:
    """The metadata of a byte-level vocabulary that was learned on the lines."""
    described = json.loads(Tokenizer.train(lines[:3000], vocab_size=900)._backend.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in described["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


def ids_of(tokenizer: Tokenizer, lines: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in tokenizer.encode_batch(lines)]


def expected_ids(backend: tokenizers.Tokenizer, lines: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch(lines, add_special_tokens=False)]


def bpe_of(metadata: dict, **options: bool) -> tokenizers.Tokenizer:
    vocab = {token: number for number, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    return tokenizers.Tokenizer(BPE(vocab, [tuple(m.split()) for m in metadata["tokenizer.ggml.merges"]], **options))


def test_gpt2s_pattern_gives_the_ids_of_transformers(byte_level, lines):
    backend = bpe_of(byte_level)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert ids_of(tokenizer_of(byte_level, "f"), lines) == expected_ids(backend, lines)


def test_qwen2s_pattern_gives_the_ids_of_transformers(byte_level, lines):
    vocab = {token: number for number, token in enumerate(byte_level["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split()) for merge in byte_level["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges, unk_token=None, eos_token=None, pad_token=None)
    ours = tokenizer_of(byte_level | {"tokenizer.ggml.pre": "qwen2"}, "f")
    assert ids_of(ours, lines) == [theirs(line, add_special_tokens=False)["input_ids"] for line in lines]


def test_llama3s_pattern_gives_the_ids_of_transformers(byte_level, lines):
    backend = bpe_of(byte_level, ignore_merges=True)
    pattern = Regex(TikTokenConverter("").pattern)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    ours = tokenizer_of(byte_level | {"tokenizer.ggml.pre": "llama-bpe"}, "f")
    assert ids_of(ours, lines) == expected_ids(backend, lines)
    assert ours.special.prefix == (0,)  # Llama 3 begins with BOS unless the file says otherwise


def test_smollms_digits_stand_alone(byte_level, lines):
    backend = bpe_of(byte_level)
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ours = tokenizer_of(byte_level | {"tokenizer.ggml.pre": "smollm"}, "f")
    assert ids_of(ours, lines) == expected_ids(backend, lines) != ids_of(tokenizer_of(byte_level, "f"), lines)


def test_sentencepiece_bpe_gives_the_ids_of_the_published_tokenizer(lines):
    folder = SHARED / "models" / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"the checkpoint {folder} is not there")
    published = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(published["vocab"], key=published["vocab"].__getitem__)
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in published["merges"]]
    rank = {"".join(pair): number for number, pair in reversed(list(enumerate(pairs)))}
    kinds = [6 if token.startswith("<0x") else 3 if token in ("<s>", "</s>") else 1 for token in tokens]
    kinds[tokens.index("<unk>")] = 2
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([-rank.get(token, 0) for token in tokens], np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, np.int32),
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
    }
    ours, theirs = tokenizer_of(metadata, "f"), Tokenizer.load(folder)
    assert ids_of(ours, lines) == ids_of(theirs, lines)
    assert ours.special == theirs.special
    ids_of_lines = ids_of(ours, lines[:500])
    assert [ours.decode(ids, whole=True) for ids in ids_of_lines] == lines[:500]


def test_unigram_gives_the_ids_of_the_library(lines):
    pieces = [(f"<0x{number:02X}>", -9.0) for number in range(256)]
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *pieces, *((f"▁{word}", -float(i)) for i, word in enumerate(make_words()))]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [piece for piece, _ in pieces],
        "tokenizer.ggml.scores": np.array([score for _, score in pieces], np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, *[6] * 256, *[1] * (len(pieces) - 258)], np.int32),
        "tokenizer.ggml.eos_token_id": 1,
    }
    ours = tokenizer_of(metadata, "f")
    plain = tokenizers.Tokenizer(Unigram(pieces, 0, byte_fallback=True))
    spaced = ["▁" + line.replace(" ", "▁") if line else "" for line in lines]
    assert ids_of(ours, lines[:2000]) == expected_ids(plain, spaced[:2000])


def make_words() -> list[str]:
    return ["the", "of", "a", "lemma", "theorem", "is", "and", "for"]


_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
PUBLISHED = {  # in the tokenizer.json of Mistral Nemo and of Phi-4-mini
    "tekken": (
        _CASED + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|" + _CASED + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "gpt-4o": (
        _CASED + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        + _CASED + r"+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_words_with_capitals_give_the_ids_of_the_published_pattern(byte_level, lines, name):
    backend = bpe_of(byte_level, ignore_merges=name == "tekken")
    split = pre_tokenizers.Split(Regex(PUBLISHED[name]), "isolated")
    byte_step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, byte_step])
    ours = tokenizer_of(byte_level | {"tokenizer.ggml.pre": name}, "f")
    some = [*HARD, "CamelCase don'T WE'RE 12345 a/b//\n", *lines[:2000]]
    assert ids_of(ours, some) == expected_ids(backend, some)


@pytest.mark.parametrize(
    ("alias", "name"),
    [("deepseek-r1-qwen", "qwen2"), ("llama-v3", "llama-bpe"), ("falcon3", "llama-bpe"), ("refact", "smollm"),
     ("phi-2", "gpt-2"), ("llama4", "gpt-4o")],
)  # fmt: skip
def test_other_names_of_a_rule_cut_as_it_does(byte_level, lines, alias, name):
    ours, theirs = (tokenizer_of(byte_level | {"tokenizer.ggml.pre": each}, "f") for each in (alias, name))
    assert ours.fingerprint == theirs.fingerprint
    assert ours.special == theirs.special


def test_tokens_outside_the_byte_alphabet_are_their_own_text(byte_level):
    tokens = [*byte_level["tokenizer.ggml.tokens"], " ", "  ", "Ġ é日", "Ġé"]
    kinds = np.array([1] * (len(tokens) - 2) + [5, 1], np.int32)
    merges = [*byte_level["tokenizer.ggml.merges"], "   "]  # two tokens of one space, with one between them
    changed = {"tokens": tokens, "token_type": kinds, "merges": merges}
    tokenizer = tokenizer_of(byte_level | {f"tokenizer.ggml.{key}": value for key, value in changed.items()}, "f")
    assert tokenizer.token_bytes[-3:] == (b"  ", "Ġ é日".encode(), b" \xe9")
    assert tokenizer.decode(tokenizer.encode("a  b")) == "a  b"


def test_a_vocabulary_without_an_end_ends_with_its_control_token_of_the_usual_name(byte_level):
    metadata = byte_level | {"tokenizer.ggml.eos_token_id": None}
    tokens = byte_level["tokenizer.ggml.tokens"]
    assert tokens[0] == "<|endoftext|>"
    for kind, ends in ((3, (0,)), (1, None)):
        kinds = np.array([kind] + [1] * (len(tokens) - 1), np.int32)
        given = metadata | {"tokenizer.ggml.token_type": kinds}
        if ends is None:
            with pytest.raises(Incompatible, match=r"names no token that ends a text.* </s> or <\|endoftext\|>"):
                tokenizer_of(given, "f")
        else:
            assert tokenizer_of(given, "f").special.end_ids == ends


def test_control_tokens_are_plain_text_unless_they_are_asked_for(byte_level):
    tokens = [*byte_level["tokenizer.ggml.tokens"], "<|im_end|>"]
    kinds = np.array([1] * (len(tokens) - 1) + [3], np.int32)
    metadata = byte_level | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    tokenizer = tokenizer_of(metadata | {"tokenizer.ggml.eot_token_id": len(tokens) - 1}, "f")
    assert len(tokens) - 1 not in tokenizer.encode("a <|im_end|> b").tolist()
    assert tokenizer.special.end_ids == (0, len(tokens) - 1)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"tokenizer.ggml.model": "rwkv"}, "'rwkv'.* gpt2, llama and t5"),
        ({"tokenizer.ggml.pre": "martian"}, "'martian'.* gpt-2"),
        ({"tokenizer.ggml.eos_token_id": None}, "names no token that ends a text"),
    ],
)
def test_an_unknown_kind_is_named_with_the_known_ones(byte_level, changed, problem):
    with pytest.raises(Incompatible, match=problem):
        tokenizer_of(byte_level | changed, "f")


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer.ggml.tokens": None},
        {"tokenizer.ggml.tokens": ["a", "a"]},
        {"tokenizer.ggml.token_type": np.array([1, 2], np.int32)},
        {"tokenizer.ggml.token_type": "normal"},
        {"tokenizer.ggml.token_type": np.full(900, np.nan, np.float32)},
        {"tokenizer.ggml.token_type": [[1]] * 900},
        {"tokenizer.ggml.scores": np.full(900, -np.inf, np.float32)},
        {"tokenizer.ggml.scores": ["best"] * 900},
        {"tokenizer.ggml.merges": ["a", "b c d"]},
        {"tokenizer.ggml.merges": ["nothere neither"]},
        {"tokenizer.ggml.merges": 7},
        {"tokenizer.ggml.bos_token_id": 10**9},
        {"tokenizer.ggml.eos_token_id": "end"},
    ],
)
def test_a_damaged_vocabulary_is_refused(byte_level, changed):
    with pytest.raises(Corrupt, match=r"f.*fetch the file again"):
        tokenizer_of(byte_level | changed, "f")
