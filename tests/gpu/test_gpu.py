"""What a CPU cannot show: everything lives on the target's device. Run with `pytest -m gpu` on a machine with a GPU."""

import pytest
import torch

from decode import Chain, PromptLookup, Sampling, StaticTree, Target, generate
from decode.compare import first_difference
from decode.costs import measure_costs
from decode.propose import Drafting
from decode.ranks import rank_texts
from decode.replay import replay, write_texts
from heads import create_head
from heads.base import FeatureBatch
from heads.medusa import MedusaConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12], [13], [20, 21]]
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (0, 0, 0)))


@pytest.fixture(scope="module")
def target(tiny_tokenizer, make_tiny_llama) -> Target:
    return Target(make_tiny_llama(dtype=torch.float32).to("cuda"), tiny_tokenizer, name="tiny")


@pytest.fixture(scope="module")
def head(target):
    head = create_head("medusa", MedusaConfig(hidden_size=32, vocab_size=320, num_heads=3, draft_vocab_size=64), target)
    torch.manual_seed(1)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return head.to("cuda")


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=[1, 2, 3, 4])])
def test_a_ragged_batch_gives_plain_text(target, head, sampling):
    plain = generate(target, PROMPTS, sampling=sampling, max_new_tokens=24)
    for options in ({"head": head, "grow": TREE}, {"head": head, "grow": Chain(2)}, {"proposer": PromptLookup()}):
        drafted = generate(target, PROMPTS, sampling=sampling, max_new_tokens=24, **options)
        for row, (one, other) in enumerate(zip(plain, drafted, strict=True)):
            difference = first_difference(target, PROMPTS[row], one.token_ids, other.token_ids, sampling, row=row)
            assert difference is None or difference.near_tie, difference


def test_drawn_trees_are_accepted_on_the_device(target, head):
    sampling = Sampling(temperature=1.0, seed=3)
    options = {
        "head": head,
        "grow": StaticTree(TREE.paths, draw="without_replacement"),
        "accept": "rejection",
        "max_new_tokens": 16,
    }
    first, second = (generate(target, PROMPTS, sampling=sampling, **options) for _ in range(2))
    assert [row.token_ids for row in first] == [row.token_ids for row in second]


def test_training_and_tuning_stay_on_the_device(target, head):
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]], device="cuda")
    hidden = target.encode(ids, [6])
    head(FeatureBatch(ids, torch.ones_like(ids, dtype=torch.bool), hidden)).loss.backward()
    assert head.blocks[0][0].linear.weight.grad is not None
    for sampling in (Sampling(seed=0), Sampling(temperature=0.8, seed=0)):
        texts = write_texts(target, PROMPTS, sampling=sampling, max_new_tokens=8, feature_layers=head.feature_layers)
        assert [row.ranks.shape[1] for row in rank_texts(head, texts, sampling=sampling)] == [3] * len(texts)
        replayed = replay(target, texts, Drafting(head, TREE), sampling=sampling)
        assert replayed.stats.tokens == sum(len(text.token_ids) for text in texts)
        assert replayed.draft_seconds > 0
    assert {cost.nodes for cost in measure_costs(target, nodes=(1, 4), contexts=(16,), repeats=2).points} == {1, 4}
