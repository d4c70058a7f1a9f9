"""The files of models: memlm's own, Hugging Face's, GGUF, adapters and encoders of texts."""
