"""Parts of the literature for the decoder, one paper a file. A part is loaded when a config names it (docs/zoo.md)."""
