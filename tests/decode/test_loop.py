"""Every way of drafting gives, token for token, the text of plain decoding and of a slow decoder without cache."""

import time

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from decode import Chain, Drafting, Match, PromptLookup, Rejection, Sampling, StaticTree, Stats, generate, stream
from heads import create_head
from heads.medusa import MedusaConfig

LIMIT = 18
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)))
PROPOSERS = ["plain", "lookup", "chain", "tree", "garbage", "vocabulary", "drawn"]
SAMPLING_NAMES = ["greedy", "sampled", "penalty", "greedy-penalty", "min-p", "processor"]


@pytest.fixture(scope="module")
def drafts(tiny_target, good_head):
    """Arguments of `generate` for each proposer."""
    torch.manual_seed(3)
    garbage = create_head("medusa", MedusaConfig(hidden_size=32, vocab_size=320, num_heads=3), tiny_target).double()
    config = MedusaConfig(hidden_size=32, vocab_size=320, num_heads=2, draft_vocab_size=30)
    small = create_head("medusa", config, tiny_target).double()
    small.set_vocabulary(torch.randperm(320)[:30].sort().values)
    for head in (garbage, small):
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return {
        "plain": {},
        "lookup": {"proposer": PromptLookup(length=4)},
        "chain": {"head": good_head},
        "tree": {"head": good_head, "grow": TREE},
        "garbage": {"head": garbage, "grow": TREE},
        "vocabulary": {"head": small, "grow": StaticTree(((0,), (1,), (0, 0), (1, 0), (1, 1)))},
        "drawn": {"head": good_head, "grow": StaticTree(TREE.paths, draw="without_replacement")},
    }


@pytest.fixture(scope="module")
def expected(tiny_target, oracles, prompts, samplings):
    """The slow decoder's texts: sampling name -> rows."""
    return {
        name: [
            oracles.slow_decode(tiny_target, prompt, sampling, LIMIT, seed=4, row=row)
            for row, prompt in enumerate(prompts)
        ]
        for name, sampling in samplings.items()
    }


def with_seed(sampling: Sampling, seed) -> Sampling:
    options = {name: getattr(sampling, name) for name in Sampling.__dataclass_fields__}
    return Sampling(**{**options, "seed": seed})


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("name", SAMPLING_NAMES)
def test_a_ragged_batch_equals_the_slow_decoder(tiny_target, drafts, expected, prompts, samplings, proposer, name):
    sampling = with_seed(samplings[name], 4)
    results = generate(tiny_target, prompts, **drafts[proposer], sampling=sampling, max_new_tokens=LIMIT, eos_ids=())
    assert [result.token_ids for result in results] == expected[name]
    assert [result.prompt_ids for result in results] == prompts
    assert all(result.finish_reason == "length" for result in results)


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize("name", SAMPLING_NAMES)
def test_a_prompt_alone_equals_the_slow_decoder(tiny_target, drafts, expected, prompts, samplings, proposer, name):
    sampling = with_seed(samplings[name], 4)
    for prompt in (prompts[0], prompts[1]):
        result = generate(tiny_target, prompt, **drafts[proposer], sampling=sampling, max_new_tokens=LIMIT, eos_ids=())
        if prompt == prompts[0]:
            assert result.token_ids == expected[name][0]  # row 0 of a batch and a single prompt have the same noise
        plain = generate(tiny_target, prompt, sampling=sampling, max_new_tokens=LIMIT, eos_ids=())
        assert result.token_ids == plain.token_ids


@pytest.mark.parametrize("proposer", ["plain", "lookup", "tree", "vocabulary"])
@pytest.mark.parametrize("name", ["sampled", "penalty", "processor"])
def test_a_list_of_seeds_makes_rows_of_any_batch_the_prompts_alone(
    tiny_target, drafts, prompts, samplings, proposer, name
):
    seeds = [11, 4, 11, 0, 2**40]
    options = {**drafts[proposer], "max_new_tokens": LIMIT, "eos_ids": ()}
    batch = generate(tiny_target, prompts, sampling=with_seed(samplings[name], seeds), **options)
    order = [3, 0, 4]
    smaller = generate(
        tiny_target,
        [prompts[i] for i in order],
        sampling=with_seed(samplings[name], [seeds[i] for i in order]),
        **options,
    )
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = generate(tiny_target, prompt, sampling=with_seed(samplings[name], seed), **options)
        assert alone.token_ids == batch[row].token_ids
        assert alone.seed == batch[row].seed == seed
        if row in order:
            assert smaller[order.index(row)].token_ids == alone.token_ids


def test_greedy_equals_transformers_generate(tiny_target, drafts, expected, prompts):
    for name, processors in (("greedy", []), ("greedy-penalty", [RepetitionPenaltyLogitsProcessor(1.7)])):
        for row, prompt in enumerate(prompts):
            with torch.no_grad():
                text = tiny_target.model.generate(
                    torch.tensor([prompt]), do_sample=False, max_new_tokens=LIMIT, eos_token_id=None, pad_token_id=1,
                    logits_processor=LogitsProcessorList(processors),
                )  # fmt: skip
            assert text[0, len(prompt) :].tolist() == expected[name][row]


def test_texts_differ_by_prompt_seed_and_sampling(expected):
    """Otherwise the equalities above would say little."""
    texts = {tuple(text) for rows in expected.values() for text in rows}
    assert len(texts) == 5 * len(expected)
    assert all(len(set(text)) > 4 for text in expected["sampled"])


def test_drafts_are_accepted_where_the_equalities_are_tested(tiny_target, drafts, prompts, samplings):
    def tokens_per_step(proposer: str, name: str) -> float:
        sampling = with_seed(samplings[name], 4)
        results = generate(
            tiny_target, prompts, **drafts[proposer], sampling=sampling, max_new_tokens=LIMIT, eos_ids=()
        )
        return sum(r.stats.tokens - 1 for r in results) / sum(r.stats.steps for r in results)

    assert tokens_per_step("tree", "greedy") > 1.5
    assert tokens_per_step("tree", "sampled") > 1.05
    assert tokens_per_step("lookup", "greedy") > 1
    assert tokens_per_step("plain", "greedy") == 1


def test_shared_noise_raises_acceptance(tiny_target, drafts, prompts):
    """Drafts ranked with the target's own noise follow its draw; the same head without it agrees less often."""

    class Unshared(Match):
        shares_noise = False

    rates = []
    for rule in (Match(), Unshared()):
        stats = []
        for seed in range(8):
            sampling = Sampling(temperature=2.0, seed=seed)
            stats += generate(
                tiny_target, prompts, **drafts["tree"], sampling=sampling, accept=rule, max_new_tokens=LIMIT, eos_ids=()
            )
        rates.append(sum(r.stats.tokens - 1 for r in stats) / sum(r.stats.steps for r in stats))
    assert rates[0] > rates[1] + 0.02


@pytest.mark.parametrize("proposer", ["plain", "lookup", "tree", "drawn", "vocabulary"])
def test_rejection_is_deterministic_by_seed_and_greedy_at_temperature_0(
    tiny_target, drafts, expected, prompts, proposer
):
    options = {**drafts[proposer], "accept": "rejection", "max_new_tokens": LIMIT, "eos_ids": ()}
    greedy = generate(tiny_target, prompts, sampling=Sampling(seed=4), **options)
    assert [result.token_ids for result in greedy] == expected["greedy"]
    texts = []
    for seed in (4, 4, 5):
        results = generate(tiny_target, prompts, sampling=Sampling(temperature=0.8, top_p=0.95, seed=seed), **options)
        assert all(len(result.token_ids) == LIMIT for result in results)
        texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1] != texts[2]
    same = generate(
        tiny_target, prompts, sampling=Sampling(temperature=0.8, seed=4), **{**options, "accept": Rejection()}
    )
    again = generate(tiny_target, prompts, sampling=Sampling(temperature=0.8, seed=4), **options)
    assert [r.token_ids for r in same] == [r.token_ids for r in again]


def test_rejection_has_the_targets_law_through_the_whole_loop(tiny_target, good_head, oracles):
    """First three tokens of many seeds, with drawn drafts, against the model's own probabilities; few likely tokens."""
    prompt, draws = [40, 41, 42], 1500
    sampling = Sampling(temperature=1.5, top_k=3)
    counts: dict[tuple[int, ...], int] = {}
    options = {"head": good_head, "grow": StaticTree(((0,), (1,), (0, 0)), draw="without_replacement"), "eos_ids": ()}
    rows = 50
    for seed in range(draws // rows):
        seeded = with_seed(sampling, seed)
        results = generate(
            tiny_target, [prompt] * rows, sampling=seeded, accept="rejection", max_new_tokens=3, **options
        )
        for result in results:
            counts[tuple(result.token_ids)] = counts.get(tuple(result.token_ids), 0) + 1
    law = {(): 1.0}
    for _ in range(3):
        texts = list(law)
        with torch.no_grad():
            logits = tiny_target.model(torch.tensor([prompt + list(text) for text in texts]), use_cache=False).logits[
                :, -1
            ]
        best = (logits / 1.5).topk(3)
        law = {
            (*text, token): law[text] * p
            for text, tokens, probs in zip(texts, best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True)
            for token, p in zip(tokens, probs, strict=True)
        }
    assert set(counts) <= set(law)
    observed = torch.tensor([counts.get(text, 0) for text in law])
    assert oracles.chi_square_p(observed, torch.tensor(list(law.values())) * draws) > 1e-6


def test_a_proposer_object_is_a_head_with_its_tree(tiny_target, good_head, expected, prompts):
    drafting = Drafting(good_head, Chain(2))
    results = generate(tiny_target, prompts, proposer=drafting, max_new_tokens=LIMIT, eos_ids=())
    assert [result.token_ids for result in results] == expected["greedy"]


def test_bursts_are_what_a_client_sees_of_each_row_and_when(tiny_target, good_head, prompts):
    seen, at, ends = {}, {}, {}
    start = time.perf_counter()
    for delta in stream(tiny_target, prompts, head=good_head, grow=TREE, max_new_tokens=LIMIT, eos_ids=()):
        seen.setdefault(delta.row, []).append(len(delta.token_ids))
        at.setdefault(delta.row, []).append(time.perf_counter() - start)
        if delta.result is not None:
            ends[delta.row] = delta.result.stats
    assert len(ends) == len(prompts)
    for row, stats in ends.items():
        seconds, tokens = zip(*stats.bursts, strict=True)
        assert list(tokens) == seen[row]
        assert sum(tokens) == stats.tokens
        assert len(tokens) == stats.steps + 1
        assert max(tokens) > 1
        assert list(seconds) == sorted(set(seconds))
        assert all(0 < then < later for then, later in zip(seconds, at[row], strict=True))
    assert Stats.total(list(ends.values())).bursts == []
