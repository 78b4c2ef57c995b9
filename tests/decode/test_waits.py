"""A step of decoding asks the device once: each question makes the host wait for all the device has to do."""

import ast
from collections import Counter
from pathlib import Path

import pytest
import torch

from decode import Chain, DraftModel, DynamicTree, PromptLookup, Sampling, StaticTree, generate
from decode.masks import additive_mask

ROOT = Path(__file__).parent.parent.parent
QUESTIONS = ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")
GROWS = {
    "chain": Chain(2),
    "tree": StaticTree(((0,), (1,), (0, 0), (0, 1))),
    "dynamic tree": DynamicTree(2, 2, 5),
}


@pytest.fixture
def asked(monkeypatch) -> Counter:
    """Counts questions to tensors, while acceptance and trees are made to believe that they are far away."""
    monkeypatch.setattr("decode.accept.answers_later", lambda device: True)
    monkeypatch.setattr("decode.dynamic.answers_later", lambda device: True)
    found: Counter = Counter()
    for name in QUESTIONS:
        monkeypatch.setattr(torch.Tensor, name, counting(found, name))
    return found


def counting(found: Counter, name: str):
    ask = getattr(torch.Tensor, name)

    def counted(tensor, *args, **options):
        found[name] += 1
        return ask(tensor, *args, **options)

    return counted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("proposer", [None, PromptLookup()], ids=["plain", "lookup"])
def test_a_step_without_a_drafter_asks_once(tiny_target, prompts, asked, temperature, proposer):
    sampling = Sampling(temperature=temperature, seed=0)
    texts = generate(tiny_target, prompts, sampling=sampling, proposer=proposer, max_new_tokens=20, eos_ids=())
    assert asked == {"tolist": 1 + max(text.stats.steps for text in texts)}  # and once behind the prompt


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("grow", GROWS)
def test_a_step_with_drafts_asks_once_and_for_the_shape_of_a_dynamic_tree_and_what_a_draft_model_has_cached(
    small_target, any_drafts, asked, temperature, grow
):
    sampling = Sampling(temperature=temperature, seed=0)
    model = isinstance(any_drafts, DraftModel)
    options = {"draft_model" if model else "head": any_drafts, "grow": GROWS[grow], "max_new_tokens": 20, "eos_ids": ()}
    texts = generate(small_target, [[5, 6, 7], [1, 2, 3, 4], [9]], sampling=sampling, **options)
    steps = max(text.stats.steps for text in texts)
    assert asked == {"tolist": 1 + steps * (1 + (grow == "dynamic tree") + model)}


def test_a_step_sends_tokens_as_often_for_many_rows_as_for_one(tiny_target, good_head, prompts, monkeypatch):
    sent = []
    monkeypatch.setattr("decode.loop.to_device", lambda values, device: sent.append(1) or torch.tensor(values))
    for options in ({}, {"head": good_head, "grow": Chain(2)}):
        counts = []
        for some in (prompts[:1], prompts):
            sent.clear()
            texts = generate(tiny_target, some, max_new_tokens=9, eos_ids=(), **options)
            texts = texts if isinstance(texts, list) else [texts]
            counts.append(len(sent) / (1 + max(text.stats.steps for text in texts)))
        assert counts[1] < counts[0] + 1


@pytest.mark.parametrize("shape", [(1, 1, 5), (3, 4, 17), (2, 3, 16)])
def test_the_rows_of_a_mask_start_where_cuda_can_read_them(shape):
    visible = torch.rand(shape) < 0.5
    mask = additive_mask(visible, torch.bfloat16)
    assert mask.shape == (shape[0], 1, *shape[1:])
    assert all(stride % 8 == 0 for stride in mask.stride()[:-1])
    assert mask.stride()[-1] == 1
    assert torch.equal(mask[:, 0] == 0, visible)
    assert mask[:, 0][~visible].eq(torch.finfo(torch.bfloat16).min).all()


@pytest.mark.parametrize("package", ["decode", "heads"])
def test_numbers_go_to_the_device_without_a_wait(package):
    """`torch.tensor(…, device=…)` waits; `heads.transfer` does not."""
    for path in sorted((ROOT / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.tensor", "torch.as_tensor"):
                assert "device" not in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno}"
