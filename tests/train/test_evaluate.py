import pytest
import torch
from accelerate import Accelerator

from decode import Stats, Target, generate
from heads.medusa import MedusaHead
from train.config import EvalConfig
from train.evaluate import Decoded, Evaluation, ratio, summarise, tree_paths


@pytest.fixture
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, 320, (n,), generator=generator).tolist() for n in (4, 9, 6)]


def test_branching_becomes_paths():
    assert tree_paths([2, 1]) == ((0,), (1,), (0, 0), (1, 0))
    assert len(tree_paths([3, 2, 1])) == 3 + 6 + 6


def test_figures_are_those_of_decoding_with_the_head(
    tiny_target: Target, tiny_head: MedusaHead, prompts, fresh_accelerate
):
    config = EvalConfig(num_prompts=3, max_new_tokens=16, tree=(3, 2, 1, 1))
    evaluation = Evaluation(Accelerator(cpu=True), tiny_target, tiny_head, prompts, config)
    measured = evaluation(lambda: False)
    assert measured is not None
    assert measured["mismatches"] == 0
    rows = [generate(tiny_target, prompt, head=tiny_head, max_new_tokens=16).stats for prompt in prompts]
    expected = sum(row.tokens - 1 for row in rows) / sum(row.steps for row in rows)
    assert measured["chain/tokens_per_step"] == pytest.approx(expected)
    assert measured["tokens_per_step"] >= 1.0
    assert measured["speedup"] > 0
    assert {"accept_rate/depth1", "chain/accept_rate/depth1", "tokens_per_step_margin"} <= measured.keys()


def test_a_text_that_differs_from_plain_decoding_is_counted(
    tiny_target: Target, tiny_head: MedusaHead, prompts, fresh_accelerate
):
    config = EvalConfig(num_prompts=3, max_new_tokens=8)
    evaluation = Evaluation(Accelerator(cpu=True), tiny_target, tiny_head, prompts, config)
    assert evaluation(lambda: False)["mismatches"] == 0
    evaluation._plain[1] = [0, *evaluation._plain[1]]  # as if plain decoding had said something else before
    assert evaluation(lambda: False)["mismatches"] == 3  # plain, chain and tree of one prompt


def test_an_evaluation_gives_up_when_asked(tiny_target: Target, tiny_head: MedusaHead, prompts, fresh_accelerate):
    config = EvalConfig(num_prompts=3, max_new_tokens=4)
    evaluation = Evaluation(Accelerator(cpu=True), tiny_target, tiny_head, prompts, config)
    assert evaluation(lambda: True) is None
    assert len(evaluation._plain) == 1  # after the first prompt


def test_rates_are_sums_over_prompts_not_means_of_rates():
    def row(method: str, steps: int, tokens: int, seconds: float, accepted: int) -> Decoded:
        stats = Stats(steps=steps, tokens=tokens, offered=[steps], accepted=[accepted], seconds=seconds)
        return Decoded(method, stats, same=True)

    decoded = [row("plain", 10, 11, 4.0, 0), row("plain", 30, 31, 4.0, 0)]
    decoded += [row(method, 5, 11, 1.0, 5) for method in ("tree", "chain")]
    decoded += [row(method, 30, 31, 3.0, 0) for method in ("tree", "chain")]
    figures = summarise(decoded)
    assert figures["tokens_per_step"] == pytest.approx(40 / 35)
    assert figures["speedup"] == pytest.approx(2.0)
    assert figures["accept_rate/depth1"] == pytest.approx(5 / 35)


def test_the_margin_covers_the_true_ratio_about_19_times_in_20():
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(400):
        steps = torch.randint(20, 60, (40,), generator=generator)
        tokens = torch.poisson(steps * 1.8, generator=generator)
        value, margin = ratio(tokens.int().tolist(), steps.tolist())
        covered += abs(value - 1.8) <= margin
    assert 0.91 < covered / 400 < 0.98


def test_the_ratio_of_one_pair_or_of_no_steps_has_no_margin():
    assert ratio([3], [2]) == (1.5, 0.0)
    assert ratio([0, 0], [0, 0]) == (0.0, 0.0)
