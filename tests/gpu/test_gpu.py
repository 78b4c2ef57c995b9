"""What a CPU cannot show: everything lives on the target's device. Run with `pytest -m gpu` on a machine with a GPU."""

import pytest
import torch

from data.conversations import Encoded
from data.features import OnlineFeatures
from decode import Chain, PromptLookup, Sampling, StaticTree, Target, generate
from decode.compare import first_difference
from decode.costs import measure_costs
from decode.propose import Drafting
from decode.ranks import rank_texts
from decode.replay import replay, write_texts
from heads import create_head, head_class
from heads.base import FeatureBatch
from heads.medusa import MedusaConfig
from train.new_head import target_sizes

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


@pytest.mark.parametrize("layers", [(), (1, 2)])
def test_states_that_are_not_kept_stay_on_the_device_and_are_the_same(target, layers):
    samples = [Encoded(list(range(5, 5 + size)), [True] * size) for size in (7, 30, 12)]
    fresh, kept = (OnlineFeatures(target, samples, memory, layers) for memory in (0, 2**30))
    assert fresh.states(1).hidden.device.type == "cuda"
    assert kept.states(1).hidden.device.type == "cpu"
    first, again, computed = kept.batch([2, 1, 0]), kept.batch([2, 1, 0]), fresh.batch([2, 1, 0])
    assert fresh.target_seconds > 0
    for name in ("token_ids", "loss_mask", "hidden", "features"):
        assert getattr(computed, name) is None or getattr(computed, name).device.type == "cuda"
        for other in (first, again):
            assert getattr(computed, name) is None or torch.equal(getattr(computed, name), getattr(other, name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_give_plain_text(tiny_tokenizer, make_tiny_llama, dtype):
    target = Target(make_tiny_llama(dtype=dtype).to("cuda"), tiny_tokenizer, name="tiny", compile=True)
    plain = generate(target, PROMPTS, max_new_tokens=24)
    drafted = generate(target, PROMPTS, max_new_tokens=24, proposer=PromptLookup())
    for row, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        difference = first_difference(target, PROMPTS[row], one.token_ids, other.token_ids, Sampling(), row=row)
        assert difference is None or difference.near_tie, difference


def test_a_float32_head_on_a_bfloat16_target_keeps_its_state(tiny_tokenizer, make_tiny_llama):
    target = Target(make_tiny_llama(dtype=torch.bfloat16).to("cuda"), tiny_tokenizer, name="tiny")
    config = head_class("eagle3").Config
    head = create_head("eagle3", config(**target_sizes(target, config), feature_layers=(1, 2)), target).to("cuda")
    generate(target, PROMPTS, head=head.eval(), grow=TREE, max_new_tokens=16, eos_ids=(), check=True)
