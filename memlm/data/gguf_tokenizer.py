"""The tokenizer that a GGUF file describes: byte-level BPE, SentencePiece BPE with byte fallback, or Unigram.

A file names the pattern that cuts text before byte-level BPE (`tokenizer.ggml.pre`) and holds the vocabulary; the
`tokenizers` library gets both in the form that `tokenizer.json` would give it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE, Unigram

from memlm.data.tokenizer import END_OF_TEXT, SpecialIds, Tokenizer
from memlm.errors import Corrupt, Incompatible

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of `tokenizer.ggml.token_type`
USUAL_ENDS = ("</s>", END_OF_TEXT)
SPACE = "▁"  # stands for a space in SentencePiece vocabularies

_WORDS_OF_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS_OF_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_REST}"
_WORDS_OF_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}|\p{{N}}{{1,3}}|{_REST}"
_WORDS_OF_QWEN2 = _WORDS_OF_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True)
class Cutting:
    """How text is cut before byte-level BPE. Without `words`, GPT-2's pattern cuts; `digits` stand alone with it."""

    words: str = ""
    digits: bool = False
    composes: bool = False  # NFC
    takes_whole_words: bool = False  # a word that is a token is that token, whatever the merges say
    begins_with_start: bool = False  # unless the file says otherwise

    @property
    def pre_tokenizer(self) -> Any:
        """The step of the `tokenizers` library."""
        if self.words:
            split = pre_tokenizers.Split(Regex(self.words), behavior="isolated")
            return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if self.digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        return byte_level


GPT2 = Cutting()
LLAMA3 = Cutting(_WORDS_OF_LLAMA3, takes_whole_words=True, begins_with_start=True)
# Each with the names that llama.cpp gives it (src/llama-vocab.cpp): smaug-bpe is SmolLM3's, dbrx OLMo 2's and Phi-4's.
_NAMES: Mapping[Cutting, str] = {
    GPT2: "default gpt-2 olmo phi-2 mpt jais trillion exaone4 gigachat a.x-4.0 mellum granite-docling",
    Cutting(digits=True): "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
    LLAMA3: "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
    Cutting(_WORDS_OF_LLAMA3): "dbrx smaug-bpe",
    Cutting(_WORDS_OF_QWEN2, composes=True): "qwen2 deepseek-r1-qwen megrez kormo f2llmv2",
    Cutting(_WORDS_OF_QWEN2): "stablelm2 hunyuan solar-open grok-2",
    Cutting(_WORDS_OF_GPT4O): "gpt-4o llama4 kanana2 minimax-m2",
    Cutting(_WORDS_OF_TEKKEN, takes_whole_words=True, begins_with_start=True): "tekken",
}
CUTTINGS: Mapping[str, Cutting] = {name: cutting for cutting, names in _NAMES.items() for name in names.split()}


def tokenizer_of(metadata: Mapping[str, Any], name: str) -> Tokenizer:
    """The tokenizer of a file's metadata; `name` is the file, for errors.

    Raises Corrupt for a vocabulary that is damaged, Incompatible for one of an unknown kind.
    """
    vocabulary = _Vocabulary.of(metadata, name)
    kind = metadata.get("tokenizer.ggml.model")
    backend_of = {"gpt2": _byte_level, "llama": _sentencepiece, "t5": _unigram}.get(str(kind))
    if backend_of is None:
        raise Incompatible(f"{name} has a tokenizer of the kind {kind!r}; this version reads gpt2, llama and t5")
    try:
        backend, begins_with_start = backend_of(metadata, vocabulary, name)
    except (Corrupt, Incompatible):
        raise
    except Exception as error:  # the library raises bare Exception
        raise Corrupt(f"the tokenizer of {name} cannot be read ({error}); fetch the file again") from error
    pairs = list(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
    backend.add_special_tokens([token for token, kind in pairs if kind == CONTROL])
    backend.add_tokens([AddedToken(token, normalized=False) for token, kind in pairs if kind == USER_DEFINED])
    return Tokenizer(backend, _special_ids(metadata, vocabulary, begins_with_start, name))


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    tokens: list[str]
    kinds: list[int]
    scores: list[float]

    @classmethod
    def of(cls, metadata: Mapping[str, Any], name: str) -> _Vocabulary:
        tokens = metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise Corrupt(f"{name} has no vocabulary (tokenizer.ggml.tokens); fetch the file again")
        if len(set(tokens)) < len(tokens):
            raise Corrupt(f"{name} has a token twice in its vocabulary; fetch the file again")
        kinds = _numbers(metadata, "tokenizer.ggml.token_type", len(tokens), 1, name)
        scores = _numbers(metadata, "tokenizer.ggml.scores", len(tokens), 0.0, name)
        try:
            kinds, scores = [int(kind) for kind in kinds], [float(score) for score in scores]
        except (TypeError, ValueError, OverflowError) as error:
            raise Corrupt(f"{name} has a token without a kind or a score ({error}); fetch the file again") from error
        if not all(map(math.isfinite, scores)):
            raise Corrupt(f"{name} has a token whose score is no finite number; fetch the file again")
        return cls(tokens, kinds, scores)

    @property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def _numbers(metadata: Mapping[str, Any], key: str, size: int, default: float, name: str) -> Sequence[Any]:
    numbers = metadata.get(key)
    if numbers is None:
        return [default] * size
    if isinstance(numbers, str) or not hasattr(numbers, "__len__") or len(numbers) != size:
        raise Corrupt(f"{name} has {size:,} tokens, and not as many numbers in {key}; fetch the file again")
    return list(numbers)


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str) -> tuple[tokenizers.Tokenizer, bool]:
    pattern = str(metadata.get("tokenizer.ggml.pre", "default"))
    cutting = CUTTINGS.get(pattern)
    if cutting is None:
        raise Incompatible(f"{name} cuts text in the way {pattern!r}; this version knows {', '.join(CUTTINGS)}")
    merges = [_pair(merge) for merge in metadata.get("tokenizer.ggml.merges", [])]
    backend = tokenizers.Tokenizer(BPE(vocabulary.ids, merges, ignore_merges=cutting.takes_whole_words))
    if cutting.composes:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer, backend.decoder = cutting.pre_tokenizer, decoders.ByteLevel()
    return backend, cutting.begins_with_start


def _pair(merge: str) -> tuple[str, str]:
    """The tokens of a merge. A raw space may begin the first, and the second may have some."""
    rest, _, right = merge[1:].partition(" ")
    return merge[:1] + rest, right


def _sentencepiece(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str
) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind == UNKNOWN), None)
    merges = list(_merges_of(vocabulary))
    backend = tokenizers.Tokenizer(BPE(vocabulary.ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    _write_spaces(backend, prepends=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    return backend, True


def _unigram(metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str) -> tuple[tokenizers.Tokenizer, bool]:
    unknown = next((i for i, kind in enumerate(vocabulary.kinds) if kind == UNKNOWN), None)
    pieces = list(zip(vocabulary.tokens, vocabulary.scores, strict=True))
    backend = tokenizers.Tokenizer(Unigram(pieces, unknown, byte_fallback=True))
    _write_spaces(backend, prepends=bool(metadata.get("tokenizer.ggml.add_space_prefix", True)))
    return backend, False


def _write_spaces(backend: tokenizers.Tokenizer, *, prepends: bool) -> None:
    """Text with SentencePiece's spaces, one before it where the file `prepends` one; decoding undoes both."""
    steps = [normalizers.Prepend(SPACE)] * prepends + [normalizers.Replace(" ", SPACE)]
    backend.normalizer = normalizers.Sequence(steps)
    undone = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(undone + [decoders.Strip(" ", 1, 0)] * prepends)


def _merges_of(vocabulary: _Vocabulary) -> Iterator[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, which has scores in their place: a pair of tokens merges where it makes
    a token, the pair of the best token first.
    """
    ids = vocabulary.ids
    pairs = [
        (-score, len(token[:cut]), len(token[cut:]), ids[token[:cut]], ids[token[cut:]])
        for token, score in zip(vocabulary.tokens, vocabulary.scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    for *_, left, right in sorted(pairs):
        yield vocabulary.tokens[left], vocabulary.tokens[right]


def _special_ids(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, begins_with_start: bool, name: str
) -> SpecialIds:
    """The special tokens that a file names. Of one that names no end, it is the control token of the usual name."""
    size = len(vocabulary.tokens)

    def id_of(key: str) -> int | None:
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < size):
            raise Corrupt(f"{name} has {token_id!r} as its {key} token, of {size:,}; fetch the file again")
        return token_id

    start, end = id_of("bos"), id_of("eos")
    ends = tuple(dict.fromkeys(token_id for token_id in (end, id_of("eot")) if token_id is not None))
    ends = ends or tuple(
        token_id
        for token_id, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.kinds, strict=True))
        if kind == CONTROL and token in USUAL_ENDS
    )
    if not ends:
        raise Incompatible(
            f"{name} names no token that ends a text (tokenizer.ggml.eos_token_id), and has none that is called"
            f" {' or '.join(USUAL_ENDS)}"
        )
    start = ends[0] if start is None else start
    adds_start = bool(metadata.get("tokenizer.ggml.add_bos_token", begins_with_start))
    return SpecialIds(start, ends, (start,) if adds_start else ())
