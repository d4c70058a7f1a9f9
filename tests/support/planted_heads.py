"""Decoders whose heads are known, because their weights were set by hand."""

import torch

from memlm.inspect.findings import Inspection
from memlm.inspect.inspection import Vocabulary, inspect_decoder
from memlm.model import Decoder, ModelConfig

VOCABULARY = 16
LENGTH = 4 * VOCABULARY  # tokens of a text: each token, four times
TOKEN, PLACE, BEFORE = slice(0, 16), slice(16, 16 + LENGTH), slice(16 + LENGTH, 32 + LENGTH)
D = BEFORE.stop
HEADS, SHARP = 4, 60.0  # a softmax of differences of so much has one weight
PREVIOUS, COPYING, INDUCTION, ANTI_COPYING = (0, 0), (0, 1), (1, 2), (1, 3)


def planted(num_kv_heads: int = HEADS) -> Decoder:
    """Two layers of four heads. The stream has a token, its place, and behind layer 0 the token before.

    Head (0, 0) looks at the place before, and writes its token into BEFORE. Head (1, 2) looks for the own token among
    those of BEFORE, and copies the token there. (0, 1) copies and (1, 3) does the opposite, and neither looks at
    anything in particular. All others read and write noise. With two key-value heads, (0, 0) and (0, 1) share values,
    and so do (1, 2) and (1, 3).
    """
    config = ModelConfig(
        vocab_size=VOCABULARY, dim=D, num_layers=2, num_heads=HEADS, num_kv_heads=num_kv_heads, ff_dim=8,
        context_length=LENGTH, head_dim=LENGTH, positions="learned",
    )  # fmt: skip
    torch.manual_seed(0)
    decoder = Decoder(config).double().eval()
    with torch.no_grad():
        decoder.embedding.weight.zero_()[:, TOKEN] = torch.eye(VOCABULARY)
        decoder.positions.weight.zero_()[:, PLACE] = torch.eye(LENGTH)
        decoder.norm.weight.fill_(3.0)
        for block in decoder.blocks:
            block.ff.down.weight.zero_()
            block.attention.qkv.weight.mul_(0.1)
            block.attention.out.weight.mul_(0.1)
    shift = torch.zeros(LENGTH, LENGTH)
    shift[1:, :-1] = torch.eye(LENGTH - 1)
    write(decoder, PREVIOUS, query=(PLACE, SHARP * torch.eye(LENGTH)), key=(PLACE, shift), to=(BEFORE, 0.15))
    write(decoder, COPYING, to=(TOKEN, 0.05))
    write(decoder, INDUCTION, query=(TOKEN, SHARP * torch.eye(16)), key=(BEFORE, torch.eye(16)), to=(TOKEN, 9.0))
    write(decoder, ANTI_COPYING, to=(TOKEN, -0.05))
    return decoder


@torch.no_grad()
def write(decoder, head, *, to, query=None, key=None):
    """Sets a head: the inputs of queries and keys, where the token that it looks at is written, and how strongly."""
    (layer, number), config = head, decoder.config
    attention = decoder.blocks[layer].attention
    H, G, d = config.num_heads, config.num_kv_heads, config.head_dim
    group = number * G // H
    weight_CdD = attention.qkv.weight.view(-1, d, D)
    for place, given in ((number, query), (H + group, key)):
        if given is not None:
            source, matrix = given
            weight_CdD[place].zero_()[: len(matrix), source] = matrix.double()
    weight_CdD[H + G + group].zero_()[:16, TOKEN] = torch.eye(16)
    target, strength = to
    out_Dd = attention.out.weight[:, number * d : (number + 1) * d]
    out_Dd.zero_()[target, :16] = strength * torch.eye(16)


def inspect_plainly(decoder: Decoder, **options) -> Inspection:
    """Inspects a decoder that has no tokenizer."""
    return inspect_decoder(decoder, Vocabulary(range(decoder.config.vocab_size)), **options)
