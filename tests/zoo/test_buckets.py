"""LSH attention and routing attention: what their papers say of buckets, recall and centroids."""

from dataclasses import replace

import pytest
import torch
from decoders import SHAPE, make, tokens_of
from zoo.weights import Weights

from memlm.errors import InvalidInput
from memlm.model import Decoder, Memorizing, ModelConfig
from memlm.model.attention.attention import Heads
from memlm.model.forward import ForwardContext
from memlm.zoo.lsh import LSH
from memlm.zoo.routing import Routing

PLAIN = replace(SHAPE, context_length=40, num_kv_heads=4)
WIDE = replace(PLAIN, head_dim=32)


def attention_of(config: ModelConfig, mixer) -> torch.nn.Module:
    return Decoder(replace(config, layers=[{"mixer": mixer}])).double().blocks[0].attention


def heads_of(vector_BHTd: torch.Tensor) -> Heads:
    return Heads(torch.cat([vector_BHTd, vector_BHTd], dim=1), vector_BHTd, vector_BHTd.shape[1])


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def met(attention, vector_BHTd: torch.Tensor) -> torch.Tensor:
    """Whether two vectors share the bucket of some round (B, H, T, T)."""
    bucket_BHTN = attention.buckets(heads_of(vector_BHTd))
    return (bucket_BHTN[:, :, :, None] == bucket_BHTN[:, :, None]).any(dim=4)


def seen_by(config: ModelConfig, tokens: list[int]) -> torch.Tensor:
    """Where the first layer looks (H, T, S)."""
    watch = Weights()
    with torch.inference_mode():
        make(config)(torch.tensor([tokens]), watch=watch)
    return watch.of_layer[0][0] > 0


@pytest.mark.parametrize("buckets", [2, 8, 32])
def test_vectors_at_random_meet_in_a_round_about_once_in_as_many_buckets(buckets):
    share = met(attention_of(WIDE, LSH(buckets=buckets, rounds=1)), random(1, 4, 300, 32))
    apart = ~torch.eye(300, dtype=torch.bool)
    assert share[..., apart].double().mean().item() == pytest.approx(1 / buckets, rel=0.2)


def test_many_rounds_of_two_buckets_find_nearly_all():
    found = met(attention_of(WIDE, LSH(buckets=2, rounds=64)), random(1, 4, 100, 32))
    assert found.double().mean() > 0.999


def test_rounds_find_a_near_pair_as_often_as_independent_tries():
    first, other = random(1, 4, 400, 32), random(1, 4, 400, 32, seed=1)
    near = 0.8 * first + 0.6 * other

    def recall(rounds: int) -> float:
        attention = attention_of(WIDE, LSH(buckets=16, rounds=rounds))
        buckets = [attention.buckets(heads_of(vectors)) for vectors in (first, near)]
        return (buckets[0] == buckets[1]).any(dim=3).double().mean().item()

    once = recall(1)
    assert 0.2 < once < 0.8
    for rounds in (2, 4, 8):
        assert recall(rounds) == pytest.approx(1 - (1 - once) ** rounds, abs=0.06)


def test_the_length_of_a_vector_changes_no_bucket_and_rounds_heads_layers_and_seeds_differ():
    attention, vectors = attention_of(WIDE, LSH(buckets=16)), random(1, 4, 50, 32)
    buckets = attention.buckets(heads_of(vectors))
    shared = attention.scaled(vectors)[1]
    assert torch.equal(attention.buckets(heads_of(attention.scaled(3 * vectors)[1])), buckets)
    assert torch.equal(attention.buckets(heads_of(shared)), buckets)
    same = random(1, 1, 50, 32).expand(1, 4, 50, 32)
    drawn = attention.buckets(heads_of(same))
    assert not torch.equal(drawn[:, 0], drawn[:, 1])
    assert not torch.equal(drawn[..., 0], drawn[..., 1])
    assert not torch.equal(attention_of(WIDE, LSH(buckets=16, seed=1)).buckets(heads_of(same)), drawn)
    second = Decoder(replace(WIDE, layers=[{"mixer": LSH(buckets=16)}])).double().blocks[1].attention
    assert not torch.equal(second.buckets(heads_of(same)), drawn)


def test_a_token_sees_itself_only_if_it_is_alone():
    seen = seen_by(replace(PLAIN, layers=[{"mixer": LSH(buckets=4, rounds=2)}]), tokens_of(30))
    own = seen.diagonal(dim1=1, dim2=2)
    assert torch.equal(own, seen.sum(dim=2) - own.long() == 0)
    assert own[:, 0].all()
    assert not own[:, 15:].all()


def test_equal_tokens_meet_at_any_distance_and_a_span_keeps_the_latest():
    tokens = [7, *tokens_of(28, seed=3), 7]
    assert seen_by(replace(PLAIN, layers=[{"mixer": LSH(buckets=16, rounds=1)}]), tokens)[:, -1, 0].all()
    counts = seen_by(replace(PLAIN, layers=[{"mixer": LSH(buckets=2, rounds=1, span=3)}]), tokens).sum(dim=2)
    assert counts.max() == 3
    union = seen_by(replace(PLAIN, layers=[{"mixer": LSH(buckets=2, rounds=4, span=3)}]), tokens).sum(dim=2)
    assert 3 < union.max() <= 12


def test_tokens_near_a_centroid_are_of_its_cluster():
    attention = attention_of(WIDE, Routing(clusters=3))
    with torch.no_grad():
        attention.centroid_KCd.copy_(torch.eye(3, 32, dtype=torch.float64) * torch.tensor([[1.0], [0.3], [7.0]]))
    group_T = torch.arange(12) % 3
    vectors = 5 * torch.eye(3, 32, dtype=torch.float64)[group_T] + 0.3 * random(1, 4, 12, 32)
    assert torch.equal(attention.buckets(heads_of(vectors)), group_T.expand(1, 4, -1))


def test_heads_see_their_cluster_its_latest_or_a_window():
    def seen(**fields) -> torch.Tensor:
        return seen_by(replace(PLAIN, layers=[{"mixer": Routing(clusters=3, **fields)}]), tokens_of(30))

    whole = seen()
    assert torch.equal(whole, whole & torch.ones(30, 30).tril().bool())
    earlier = whole & whole.mT | whole | whole.mT
    assert torch.equal((earlier.double() @ earlier.double() > 0), earlier)  # clusters: to be seen is transitive
    assert (whole.sum(dim=2)[:, -1] < 30).any()
    assert seen(span=4).sum(dim=2).max() == 4
    assert seen(span=4).diagonal(dim1=1, dim2=2).all()
    local = seen(local_heads=3, local_window=5)
    assert torch.equal(local[:3].sum(dim=2), torch.arange(1, 31).clamp(max=5).expand(3, -1))


def told(attention, vectors: torch.Tensor, new_B: list[int]) -> torch.Tensor:
    context = ForwardContext(mask=None, new_B=new_B, dtype=torch.float64, losses={})
    context.__dict__["is_real_BT"] = torch.arange(vectors.shape[2]) < torch.tensor(new_B)[:, None]
    heads = heads_of(attention.scaled(vectors)[1])
    return attention._distance(heads, attention.buckets(heads), context)


def test_a_step_down_the_loss_is_a_step_of_the_papers_running_mean():
    attention = attention_of(WIDE, Routing(clusters=2))
    vectors, new_B = random(2, 4, 9, 32), [9, 4]
    loss = told(attention, vectors, new_B)
    (gradient,) = torch.autograd.grad(loss, attention.centroid_KCd)
    heads = heads_of(attention.scaled(vectors)[1])
    unit, bucket = torch.nn.functional.normalize(heads.key_BGTd, dim=3), attention.buckets(heads)
    for h in range(4):
        for c in range(2):
            own = torch.cat([unit[b, h, :n][bucket[b, h, :n] == c] for b, n in enumerate(new_B)])
            mean = own.mean(dim=0) if len(own) else attention.centroid_KCd[h, c]
            share = len(own) / (4 * sum(new_B))  # of the members among all tokens and heads
            torch.testing.assert_close(gradient[h, c], share * (attention.centroid_KCd[h, c] - mean))


def test_centroids_move_to_the_groups_of_their_tokens():
    attention = attention_of(WIDE, Routing(clusters=2))
    group_T = torch.arange(60) % 2
    vectors = 4 * random(2, 32, seed=5)[group_T] + random(1, 4, 60, 32)
    optimizer = torch.optim.SGD([attention.centroid_KCd], lr=2.0)
    for _ in range(60):
        told(attention, vectors, [60]).backward()
        optimizer.step()
        optimizer.zero_grad()
    bucket = attention.buckets(heads_of(attention.scaled(vectors)[1]))[0]
    unit = torch.nn.functional.normalize(attention.scaled(vectors)[1], dim=3)[0]
    for h in range(4):
        for c in bucket[h].unique():
            mean = unit[h, bucket[h] == c].mean(dim=0)
            torch.testing.assert_close(attention.centroid_KCd[h, c].detach(), mean, atol=1e-3, rtol=0)


def test_centroids_learn_while_training_alone():
    decoder = make(replace(PLAIN, layers=[{"mixer": Routing(clusters=3)}]))
    decoder(torch.tensor([tokens_of(20)]))
    assert decoder.take_losses().item() > 0
    with torch.inference_mode():
        decoder(torch.tensor([tokens_of(20)]))
    assert decoder.take_losses() is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": [{"mixer": "lsh"}], "num_kv_heads": 2}, "4 heads and 2 kv heads, expected as many"),
        ({"layers": [{"mixer": "routing"}], "qk_norm": True}, "routing does not go with qk_norm"),
        ({"layers": [{"mixer": "lsh"}], "memorizing": Memorizing(layers=(1,))}, "lsh does not go with memorizing"),
        ({"layers": [{"mixer": "lsh", "buckets": 5}]}, "buckets is 5; expected an even number"),
        ({"layers": [{"mixer": "routing", "local_heads": 4}]}, "local_heads is 4 of 4 heads"),
        ({"layers": [{"mixer": "routing", "follow": 0.0}]}, "follow is 0"),
    ],
)
def test_what_buckets_cannot_do_is_refused_in_words(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(PLAIN, **changes)
