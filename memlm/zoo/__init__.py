"""Parts of the literature for the decoder, one paper a file (docs/zoo.md).

They are entry points in pyproject.toml, and are loaded when a config names them. Nothing in the package imports them,
but for the public name Seq2Seq.
"""
