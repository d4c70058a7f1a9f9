"""27. Does memory work at all? A model whose window cannot see the answer learns to look it up."""

import pytest
import torch
import torch.nn.functional as F

from memlm.model import Decoder, Memorizing, ModelConfig

NUM_TOKENS, PAIRS = 16, 4  # keys are 0 to 7, values 8 to 15, and 16 begins a text
SEGMENT = 2 * PAIRS
STEPS = 4000
GUESS = 1.386  # nats of a guess among the four values that the text has named, repeats aside


def dictionaries(count: int, generator: torch.Generator) -> torch.Tensor:
    """Texts of two segments: four keys with their values, then the keys in another order, each with its value."""
    rows = []
    for _ in range(count):
        keys = torch.randperm(NUM_TOKENS // 2, generator=generator)[:PAIRS]
        values = NUM_TOKENS // 2 + torch.randint(NUM_TOKENS // 2, (PAIRS,), generator=generator)
        order = torch.randperm(PAIRS, generator=generator)
        first = torch.stack([keys, values], dim=1).flatten()
        second = torch.stack([keys[order], values[order]], dim=1).flatten()
        rows.append(torch.cat([torch.tensor([NUM_TOKENS]), first, second]))
    return torch.stack(rows)


def answers(decoder: Decoder, texts_BT: torch.Tensor, change=None) -> torch.Tensor:
    """Nats of the values in the second segment. `change` may do something to the memories in between."""
    state = decoder.new_state(batch_size=len(texts_BT), training=True)
    decoder(texts_BT[:, :SEGMENT], state)
    if change:
        change([row for rows in state.knn_caches.values() for row in rows])
    hidden_BTD, _ = decoder(texts_BT[:, SEGMENT:-1], state)
    losses = F.cross_entropy(
        decoder.logits(hidden_BTD).flatten(0, 1), texts_BT[:, SEGMENT + 1 :].flatten(), reduction="none"
    )
    return losses.view(len(texts_BT), -1)[:, 1::2].mean()


@pytest.mark.slow
def test_27_a_dictionary_beyond_the_window_is_looked_up():
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=NUM_TOKENS + 1, dim=64, num_layers=2, num_heads=4, num_kv_heads=4, ff_dim=128,
        context_length=SEGMENT, memorizing=Memorizing(layers=(1,), top_k=4, capacity=256, storage="model"),
    )  # fmt: skip
    decoder, generator = Decoder(config), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=4e-3, betas=(0.9, 0.98))
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 4e-3 * (1 - step / STEPS)
        answers(decoder, dictionaries(32, generator)).backward()
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def swap_documents(rows):
        rings = [row._ring_2GNd.clone() for row in rows]
        for row, ring in zip(rows, rings[1:] + rings[:1], strict=True):
            row._ring_2GNd = ring

    def zero_values(rows):
        for row in rows:
            row._ring_2GNd[1] = 0

    def forget(rows):
        for row in rows:
            row.clear()

    texts = dictionaries(256, torch.Generator().manual_seed(99))
    with torch.inference_mode():
        remembered = float(answers(decoder, texts))
        spoilt = {change: float(answers(decoder, texts, change)) for change in (swap_documents, zero_values, forget)}
    assert remembered < GUESS - 0.3
    for change, nats in spoilt.items():
        assert nats > remembered + 0.5, change.__name__
