"""The limit on the RAM for keys and values of a worker's running generations."""

from __future__ import annotations

from memlm.errors import InvalidInput
from memlm.model.files.checkpoint import Checkpoint
from memlm.model.state.size import row_bytes

MIB = 1 << 20


class CacheBudget:
    """`max_bytes` for all running generations.

    Each counts with its prompt and its longest output, so that none has to be stopped half way. Its row takes that RAM
    only as it grows (memlm/model/state/pages.py).
    """

    def __init__(self, max_bytes: int, checkpoint: Checkpoint) -> None:
        self.max_bytes, self._checkpoint = max_bytes, checkpoint

    def required_bytes(self, num_tokens: int, num_rows: int = 1, copies: int = 1) -> int:
        """The bytes of rows of so many tokens, of which there are `copies` for a while. Raises InvalidInput where that
        exceeds `max_bytes`.
        """
        decoder = self._checkpoint.decoder
        required_bytes = copies * num_rows * row_bytes(decoder.config, num_tokens, decoder.dtype)
        if required_bytes > self.max_bytes:
            needed, total = required_bytes / MIB, self.max_bytes / MIB
            raise InvalidInput(
                f"{f'{num_rows} prompts of ' if num_rows > 1 else ''}{num_tokens:,} tokens of prompt and output need"
                f" {needed:,.2f} MiB of RAM for keys and values, and this server has {total:,.2f} MiB for those of a"
                f" worker's running requests; ask for fewer {'passages or ' if num_rows > 1 else ''}max_tokens, shorten"
                " the prompt, or start the server with more --cache-bytes",
                field="max_tokens",
            )
        return required_bytes
