"""Models of other shapes than a decoder's: encoder-decoders, and decoders inside of others, with files and training.

`memlm.load`, the server and the commands read none of them (docs/zoo.md).
"""
