"""Growing trees at the ends of texts and batches: with every kind of head, text and log-probabilities are plain."""

import pytest
import torch

from decode import DraftModel, DynamicTree, Sampling, Target, generate, stream
from heads import Head, create_head, head_class
from train.new_head import target_sizes

KINDS = {
    "medusa": {"num_heads": 3},
    "hydra": {"num_heads": 3, "prefix_layer": True},
    "eagle": {"max_depth": 3},
    "eagle3": {"max_depth": 3, "feature_layers": (1, 2)},
}
TREES = [DynamicTree(3, 4, 9), DynamicTree(1, 40, 200)]
VOCABULARY = torch.tensor([1, *range(20, 320, 7)])


def make_head(kind: str, target: Target) -> Head:
    torch.manual_seed(1)
    config = head_class(kind).Config
    sizes = target_sizes(target, config)
    head = create_head(kind, config(**KINDS[kind], **sizes, draft_vocab_size=len(VOCABULARY)), target)
    head.set_vocabulary(VOCABULARY)
    for parameter in head.parameters():
        parameter.data += torch.randn_like(parameter) * 0.05
    return head.to(target.dtype).eval()


@pytest.fixture(scope="module")
def drafts(tiny_target, tiny_tokenizer, make_tiny_llama):
    """A head of every kind with a small draft vocabulary, and a draft model that is nearly the target."""
    model = make_tiny_llama()
    for parameter in model.parameters():
        parameter.data.mul_(1.02)
    draft = DraftModel(Target(model, tiny_tokenizer, name="nearly"), tiny_target)
    return {kind: {"head": make_head(kind, tiny_target)} for kind in KINDS} | {"draft model": {"draft_model": draft}}


@pytest.fixture(scope="module")
def batches(tiny_target):
    """Prompts and options: one token, stop strings, and rows that fill the context beside one that does not."""
    ragged = [[40, 41, 42, 43, 44, 40, 41], [300], [120, 121] * 10]
    full = [[3 + n % 50 for n in range(tiny_target.max_length - short)] for short in (1, 2, 5)]
    return [
        (ragged, {"max_new_tokens": 1}),
        (ragged, {"max_new_tokens": 8, "stop": ["a", "the"]}),
        ([*full, [5]], {"max_new_tokens": 7, "eos_ids": ()}),
    ]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*KINDS, "draft model"])
def test_at_all_ends_of_a_batch_the_text_and_its_logprobs_are_plain_decodings(
    tiny_target, drafts, batches, name, sampling
):
    for prompts, options in batches:
        options = {**options, "sampling": sampling, "logprobs": True}
        plain = generate(tiny_target, prompts, **options)
        for grow in TREES:
            out = generate(tiny_target, prompts, **drafts[name], grow=grow, check=grow is TREES[0], **options)
            assert [(a.token_ids, a.text, a.finish_reason) for a in out] == [
                (b.token_ids, b.text, b.finish_reason) for b in plain
            ]
            for a, b in zip(out, plain, strict=True):
                torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs))
        texts = [""] * len(prompts)
        for piece in stream(tiny_target, prompts, **drafts[name], grow=TREES[0], **options):
            texts[piece.row] += piece.text
        assert texts == [result.text for result in plain]


def test_a_tree_takes_no_more_memory_than_its_depth_and_width_can_fill(tiny_target, drafts, monkeypatch):
    capacities = []
    session = Target.session

    def record(self, rows, capacity, *rest):
        capacities.append(capacity)
        return session(self, rows, min(capacity, 200), *rest)

    monkeypatch.setattr(Target, "session", record)
    generate(tiny_target, [5, 6], **drafts["eagle"], grow=DynamicTree(2, 2, 10**8), max_new_tokens=4)
    assert capacities[0] == 2 + 4 + 7  # the prompt, the new tokens, and the tree: a root, 2 and 4 candidates
