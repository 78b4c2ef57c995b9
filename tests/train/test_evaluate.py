from collections.abc import Callable

import pytest
import torch
from accelerate import Accelerator

from decode import Drafting, DynamicTree, Sampling, StaticTree, Stats, Target, generate
from heads.medusa import MedusaConfig, MedusaHead
from train.config import ConfigError, EvalConfig
from train.evaluate import Decoded, Evaluation, draft_tree, summarise, tree_paths

Sets = dict[str, list[list[int]]]


@pytest.fixture
def sets() -> Sets:
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 320, (n,), generator=generator).tolist() for n in (4, 9, 6)]
    return {"chat": prompts[:2], "code": prompts[2:]}


@pytest.fixture
def evaluation(tiny_target: Target, tiny_head: MedusaHead, sets: Sets, fresh_accelerate) -> Callable[..., Evaluation]:
    def make(**config) -> Evaluation:
        config = EvalConfig(**{"max_new_tokens": 16, "tree": (3, 2, 1, 1), **config})
        return Evaluation(Accelerator(cpu=True), tiny_target, tiny_head, sets, config)

    return make


def test_branching_becomes_paths():
    assert tree_paths([2, 1]) == ((0,), (1,), (0, 0), (1, 0))
    assert len(tree_paths([3, 2, 1])) == 3 + 6 + 6


def test_a_tree_wider_than_the_draft_vocabulary_is_refused_with_the_keys(tiny_target: Target):
    head = MedusaHead(MedusaConfig(hidden_size=32, vocab_size=320, num_heads=3, draft_vocab_size=2), tiny_target)
    with pytest.raises(ConfigError, match=r"3 children, .* 2 tokens; raise head\.draft_vocab_size .* lower eval\.tree"):
        draft_tree(head, (3, 1))
    assert draft_tree(head, (2, 1)).grow.width == 2


def test_the_heads_own_tree_wins_over_the_configs(tiny_head: MedusaHead):
    assert draft_tree(tiny_head, (2, 1, 1, 1, 1)) == Drafting(tiny_head, StaticTree(tree_paths((2, 1, 1))))
    tiny_head.tree = [[0], [1]]
    assert draft_tree(tiny_head, (2, 1)).grow == StaticTree(((0,), (1,)))
    tiny_head.tree = {"depth": 2, "width": 3, "size": 5}
    assert draft_tree(tiny_head, (2, 1)).grow == DynamicTree(depth=2, width=3, size=5)


@pytest.mark.parametrize("tree", [None, {"depth": 2, "width": 3, "size": 5}])
def test_figures_are_those_of_decoding_with_the_head(evaluation, tiny_target, tiny_head: MedusaHead, sets: Sets, tree):
    tiny_head.tree = tree
    measured = evaluation()(lambda: False)
    assert measured is not None
    assert measured["mismatches"] == 0
    grow = StaticTree(tree_paths((3, 2, 1))) if tree is None else DynamicTree(**tree)
    numbered = list(enumerate([*sets["chat"], *sets["code"]]))

    def expected(chosen: list[tuple[int, list[int]]], temperature: float, proposer: Drafting) -> Stats:
        sampled = [Sampling(temperature=temperature, seed=number) for number, _ in chosen]
        return Stats.total(
            [
                generate(tiny_target, prompt, proposer=proposer, sampling=sampling, max_new_tokens=16).stats
                for (_, prompt), sampling in zip(chosen, sampled, strict=True)
            ]
        )

    chain = Drafting(tiny_head, StaticTree(tuple((0,) * n for n in range(1, grow.depth + 1))))
    for prefix, chosen, temperature, proposer in [
        ("", numbered, 0.0, Drafting(tiny_head, grow)),
        ("chain/", numbered, 0.0, chain),
        ("t1/", numbered, 1.0, Drafting(tiny_head, grow)),
        ("chat/", numbered[:2], 0.0, Drafting(tiny_head, grow)),
        ("code/chain/", numbered[2:], 0.0, chain),
        ("chat/t1/", numbered[:2], 1.0, Drafting(tiny_head, grow)),
    ]:
        total = expected(chosen, temperature, proposer)
        assert measured[f"{prefix}tokens_per_step"] == pytest.approx(total.tokens_per_step), prefix
        rates = [measured[f"{prefix}accept_rate/depth{depth + 1}"] for depth in range(len(total.offered))]
        assert rates == pytest.approx(total.accept_rates), prefix
        assert measured[f"{prefix}speedup"] > 0
    assert not any("t1/chain" in name for name in measured)


def test_sampled_texts_differ_from_greedy_ones_and_from_prompt_to_prompt(evaluation):
    made = evaluation(temperatures=(0.0, 1.0, 0.5))
    measured = made(lambda: False)
    assert measured["mismatches"] == 0
    assert {"t1/tokens_per_step", "t0.5/tokens_per_step_low"} <= measured.keys()
    texts = {key: tuple(text) for key, text in made._plain.items()}
    assert len(texts) == 9
    assert len(set(texts.values())) == 9


def test_a_text_that_differs_from_plain_decoding_is_counted(evaluation):
    made = evaluation(max_new_tokens=8)
    assert made(lambda: False)["mismatches"] == 0
    made._plain[1, 0.0] = [0, *made._plain[1, 0.0]]  # as if plain decoding had said something else before
    assert made(lambda: False)["mismatches"] == 3  # plain, chain and tree of one prompt
    made._plain[2, 1.0] = [0, *made._plain[2, 1.0]]
    assert made(lambda: False)["mismatches"] == 5  # and plain and tree at the other temperature


def test_the_first_prompts_of_each_set_are_samples_without_more_decoding(
    tiny_target: Target, tiny_head: MedusaHead, fresh_accelerate, monkeypatch: pytest.MonkeyPatch
):
    prompts = [[number, 7, 9] for number in range(2, 8)]
    made = Evaluation(
        Accelerator(cpu=True), tiny_target, tiny_head, {"chat": prompts, "code": [[3, 5]]}, EvalConfig(max_new_tokens=6)
    )
    calls = []
    monkeypatch.setattr("train.evaluate.generate", lambda *a, **b: calls.append(a) or generate(*a, **b))
    assert made.samples == ()
    made(lambda: False)
    assert len(calls) == 5 * (7 + 1)  # five ways, and once to warm up
    assert [sample.prompt_set for sample in made.samples] == ["chat"] * 4 + ["code"]
    assert [sample.prompt for sample in made.samples] == [
        tiny_target.tokenizer.decode(prompt) for prompt in [*prompts[:4], [3, 5]]
    ]
    for number, sample in zip((0, 1, 2, 3, 6), made.samples, strict=True):
        assert "".join(text for text, _ in sample.pieces) == tiny_target.tokenizer.decode(made._plain[number, 0.0])


def test_an_evaluation_gives_up_when_asked(evaluation):
    made = evaluation(max_new_tokens=4)
    assert made(lambda: True) is None
    assert {prompt for prompt, _ in made._plain} == {0}  # after the first prompt


def test_the_heads_linear_layers_are_packed_while_it_is_evaluated_and_no_longer(evaluation, tiny_head: MedusaHead):
    layers = [module for module in tiny_head.float().modules() if type(module) is torch.nn.Linear]
    seen = []

    def look() -> bool:
        seen.extend("forward" in vars(layer) for layer in layers)
        return True

    evaluation(max_new_tokens=4)(look)
    assert seen
    assert all(seen)
    assert not any("forward" in vars(layer) for layer in layers)


def row(prompt: int, method: str, steps: int, tokens: int, seconds: float, *accepted: int, **other) -> Decoded:
    stats = Stats(steps=steps, tokens=tokens, offered=[steps, *accepted][: len(accepted)], seconds=seconds)
    stats.accepted = list(accepted)
    return Decoded(prompt, **{"prompt_set": "a", "temperature": 0.0, "same": True, **other}, method=method, stats=stats)


def test_rates_are_sums_over_prompts_not_means_of_rates():
    decoded = [row(0, "plain", 10, 11, 4.0), row(1, "plain", 30, 31, 4.0)]
    decoded += [row(0, method, 5, 11, 1.0, 5, 2) for method in ("tree", "chain")]
    decoded += [row(1, method, 30, 31, 3.0, 0) for method in ("tree", "chain")]
    figures = summarise(decoded)
    assert figures["tokens_per_step"] == pytest.approx(40 / 35)
    assert (figures["tokens_per_step_low"], figures["tokens_per_step_high"]) == pytest.approx((1.0, 2.0))
    assert figures["speedup"] == pytest.approx(2.0)
    assert figures["accept_rate/depth1"] == pytest.approx(5 / 35)
    assert figures["accept_rate/depth2"] == pytest.approx(2 / 5)  # the other prompt never came that far
    assert (figures["accept_rate/depth1_low"], figures["accept_rate/depth1_high"]) == pytest.approx((0.0, 1.0))


def test_figures_do_not_depend_on_who_decoded_which_prompt():
    decoded = [
        row(number, method, 5 + number, 11 + number**2 % 7, 1.0 + number, 3, prompt_set="ab"[number > 5])
        for number in range(12)
        for method in ("plain", "tree", "chain")
    ]
    assert summarise(decoded[18:] + decoded[:18]) == summarise(decoded)
    assert summarise(decoded)["a/tokens_per_step"] == pytest.approx(
        sum(10 + number**2 % 7 for number in range(6)) / sum(5 + number for number in range(6))
    )
    assert "a/tokens_per_step" not in summarise(decoded[:18])  # a single set has no figures of its own


def test_the_speed_up_is_over_plain_decoding_at_the_same_temperature():
    decoded = [row(0, "plain", 10, 11, 4.0), row(0, "tree", 5, 11, 2.0)]
    decoded += [row(0, "plain", 20, 21, 9.0, temperature=1.0), row(0, "tree", 8, 21, 3.0, temperature=1.0)]
    figures = summarise(decoded)
    assert (figures["speedup"], figures["t1/speedup"]) == pytest.approx((2.0, 3.0))
    assert figures["t1/tokens_per_step"] == pytest.approx(2.5)
