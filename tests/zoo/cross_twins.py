"""The twins of cross parts, and decoders whose every state has a source."""

import numpy as np
import torch

from memlm.model import Decoder, DecoderState, ModelConfig
from memlm.zoo.shapes.source_attention import SourceAttention, make_sources


class WithSource(Decoder):
    """A decoder all of whose rows read one source, as if they were of one encoded text."""

    @property
    def states_ND(self) -> torch.Tensor:
        return torch.randn(5, self.config.dim, generator=torch.Generator().manual_seed(11)).to(self.dtype)

    def new_state(self, *, batch_size: int = 1, **more) -> DecoderState:
        (source,) = make_sources(self.blocks, self.states_ND[None], [5])
        return super().new_state(batch_size=batch_size, sources_B=[source] * batch_size, **more)


def kind_of(config: ModelConfig) -> type[Decoder]:
    return WithSource if config.reads_source else Decoder


def source_read(twin, part, block, x):
    """softmax(q k) v over the states of the source, one token and head at a time."""
    c, prefix, states = twin.config, f"blocks.{block}.cross.", twin.decoder.states_ND.numpy()
    H, G, d = c.num_heads, c.num_kv_heads, c.head_dim
    queries = twin.linear(prefix + "query", twin.norm(prefix + "norm", x)).reshape(len(x), H, d)
    pairs = twin.linear(prefix + "key_value", states).reshape(len(states), 2, G, d)
    out = np.zeros((len(x), H, d))
    for t in range(len(x)):
        for h in range(H):
            keys, values = pairs[:, :, h // (H // G)].swapaxes(0, 1)
            scores = np.array([queries[t, h] @ key for key in keys]) * c.query_scale / np.sqrt(d)
            weights = np.exp(scores - scores.max())
            out[t, h] = sum(w * value for w, value in zip(weights / weights.sum(), values, strict=True))
    return twin.linear(prefix + "out", out.reshape(len(x), -1))


CROSSES = {SourceAttention: source_read}
