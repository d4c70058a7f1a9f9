"""The decoder: token ids and a state -> hidden states, keys and log-probabilities."""

from memlm.model.config import Compression, Memorizing, ModelConfig, RopeScaling
from memlm.model.decoder import Decoder, decoding_threads
from memlm.model.state import DecoderState

__all__ = ["Compression", "Decoder", "DecoderState", "Memorizing", "ModelConfig", "RopeScaling", "decoding_threads"]
