"""The decoder: token ids and a state -> hidden states, keys and log-probabilities."""

from memlm.model.config import ModelConfig
from memlm.model.decoder import Decoder, decoding_threads
from memlm.model.mechanisms import Compression, Memorizing, RopeScaling
from memlm.model.state.decoder_state import DecoderState

__all__ = ["Compression", "Decoder", "DecoderState", "Memorizing", "ModelConfig", "RopeScaling", "decoding_threads"]
