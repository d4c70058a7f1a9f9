"""A tiny model that says given pieces one after another: each token's successor is all that it knows."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from chats import END_ID, TOKENS, give_template
from tokenizers import AddedToken

from memlm.data.tokenizer import SpecialIds, Tokenizer
from memlm.model import Decoder, ModelConfig
from memlm.model.files.checkpoint import save_checkpoint

WIDTH = 128  # as many directions that are all but at right angles


def save_speaker(
    folder: Path, tokenizer: Tokenizer, template: str, lines: Mapping[str, Sequence[str]], special: Sequence[str] = ()
) -> Path:
    """Saves a model that says a line's pieces behind its cue, the end of a prompt, and then ends its turn. No piece may
    stand in two places. The `special` pieces have no bytes of their own.
    """
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    backend.add_special_tokens([*TOKENS.values(), *special])
    pieces = [piece for cue, line in lines.items() for piece in (cue, *line) if piece not in special]
    assert len({*pieces}) == len(pieces)
    backend.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in pieces])
    shape = {"dim": WIDTH, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "ff_dim": 8, "context_length": 2000}
    torch.manual_seed(0)
    decoder = Decoder(ModelConfig(vocab_size=backend.get_vocab_size(), tied_embeddings=False, **shape))
    weights = dict(decoder.named_parameters())
    with torch.no_grad():
        for name in ("blocks.0.attention.out.weight", "blocks.0.ff.down.weight", "head.weight"):
            weights[name].zero_()
        rows_VD = torch.nn.functional.normalize(torch.randn(backend.get_vocab_size(), WIDTH), dim=1)
        weights["embedding.weight"].copy_(rows_VD)
        for cue, line in lines.items():
            ids = [*map(backend.token_to_id, (cue, *line)), END_ID]
            for before, after in pairwise(ids):
                weights["head.weight"][after] += 5 * rows_VD[before]
    save_checkpoint(folder, decoder, Tokenizer(backend, SpecialIds(300, (tokenizer.end_id,), ())))
    give_template(folder, template, TOKENS)
    return folder
