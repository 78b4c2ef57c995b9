"""Every parameter acts at every node as in plain decoding: on the path to the node, for the node's own row."""

import pytest
import torch
from transformers import LogitsProcessor

from decode import Match, PromptLookup, Rejection, Sampling, StaticTree, generate
from decode.compare import first_difference
from decode.sampling import Sampler
from decode.tree import TokenTree, chain_shape

LIMIT, DEPTH, SEED = 10, 3, 4
V = 320
TREE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


class Echo(LogitsProcessor):
    """Likes the last token, so that texts repeat themselves."""

    def __call__(self, input_ids, scores):
        return scores.scatter_add(1, input_ids[:, -1:], scores.new_full((1, 1), 9.0))


class ParityBan(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.index_fill(1, torch.arange((int(input_ids.sum()) + input_ids.shape[1]) % 2, V, 2), -torch.inf)


class Grammar(LogitsProcessor):
    """Its state depends on every call so far; it must be asked once for each token and not behind an end."""

    def __init__(self, ends=()):
        self.ends = sorted(ends)
        self.state = 0
        self.length = None

    def __call__(self, input_ids, scores):
        length, last = input_ids.shape[1], int(input_ids[0, -1])
        assert self.length in (None, length - 1), "asked twice, or out of order"
        assert self.length is None or last not in self.ends, "asked behind the end"
        self.length = length
        self.state = (3 * self.state + last) % 5
        banned = [token for token in range(self.state, V, 5) if token not in self.ends]
        return scores.index_fill(1, torch.tensor(banned), -torch.inf)


def residue_of_row(row: int, ids: torch.Tensor) -> list[int]:
    assert ids.dim() == 1
    return list(range((int(ids[-1]) + row) % 3, V, 3))


PARAMETERS = {
    "repetition": {"repetition_penalty": 3.0},
    "presence": {"presence_penalty": 8.0, "processors": [Echo()]},
    "frequency": {"frequency_penalty": 5.0, "processors": [Echo()]},
    "both": {"presence_penalty": -3.0, "frequency_penalty": 6.0, "processors": [Echo()]},
    "bad-repeats": {"bad_words_ids": [[t, t] for t in range(V)], "processors": [Echo()]},
    "bad-words": {
        "bad_words_ids": [[214], [107], [300], [263, 141], [274, 310], [217, 157, 204], [233, 61], [40, 151]],
    },
    "prefix": {"prefix_allowed_tokens_fn": residue_of_row},
    "parity": {"processors": [ParityBan()]},
    "grammar": {"processors": [Grammar]},  # a class: every text needs a new one
    "min-p": {"min_p": 0.4},
    "top-k": {"top_k": 2},
    "top-p": {"top_p": 0.4},
    "typical-p": {"typical_p": 0.4},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
        "bad_words_ids": [[214], [7, 8]],
        "prefix_allowed_tokens_fn": residue_of_row,
        "processors": [Echo()],
        "top_k": 40,
        "min_p": 0.01,
        "typical_p": 0.9,
    },
}
WARPERS = {"min-p", "top-k", "top-p", "typical-p"}  # nothing to do at temperature 0
CASES = [(name, t) for name in PARAMETERS for t in (0.0, 0.9) if t > 0 or name not in WARPERS]


def make(name: str, temperature: float) -> Sampling:
    settings = dict(PARAMETERS[name])
    settings["processors"] = [p() if isinstance(p, type) else p for p in settings.get("processors", ())]
    return Sampling(**settings, temperature=temperature, seed=SEED)


@pytest.fixture(scope="module")
def expected(tiny_target, oracles, prompts):
    """(name, temperature, prompt, row) -> the slow decoder's text."""
    known: dict[tuple, list[int]] = {}

    def text(name: str, temperature: float, prompt: int, row: int) -> list[int]:
        key = (name, temperature, prompt, row)
        if key not in known:
            sampling = make(name, temperature)
            known[key] = oracles.slow_decode(tiny_target, prompts[prompt], sampling, LIMIT, seed=SEED, row=row)
        return known[key]

    return text


@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_a_parameter_changes_texts(tiny_target, oracles, prompts, expected, name, temperature):
    """Otherwise the equalities below would say little."""
    echo = name in ("presence", "frequency", "both", "bad-repeats", "all")
    without = Sampling(temperature=temperature, processors=[Echo()] if echo else ())
    changed = [
        expected(name, temperature, row, row)
        != oracles.slow_decode(tiny_target, prompt, without, LIMIT, seed=SEED, row=row)
        for row, prompt in enumerate(prompts)
    ]
    assert sum(changed) >= (2 if name == "repetition" else 4)


@pytest.mark.parametrize("proposer", ["tree", "lookup", "self", "anti"])
@pytest.mark.parametrize(("name", "temperature"), CASES)
@pytest.mark.parametrize("prompt", [None, 3], ids=["batch", "alone"])
def test_the_text_is_the_slow_decoders(
    tiny_target, oracles, good_head, prompts, expected, name, temperature, proposer, prompt
):
    places = [(3, 0)] if prompt == 3 else [(row, row) for row in range(len(prompts))]
    answers = [expected(name, temperature, *place) for place in places]
    given = [prompts[number] for number, _ in places]
    texts = [before + answer for before, answer in zip(given, answers, strict=True)]
    drafts = {
        "tree": {"head": good_head, "grow": TREE},
        "lookup": {"proposer": PromptLookup(length=4)},
        "self": {"proposer": oracles.self_draft(texts, DEPTH)},
        "anti": {"proposer": oracles.anti_draft(texts, DEPTH)},
    }[proposer]
    sampling = make(name, temperature)
    results = generate(tiny_target, given, **drafts, sampling=sampling, max_new_tokens=LIMIT, eos_ids=())
    assert [result.token_ids for result in results] == answers
    steps = {"self": -(-(LIMIT - 1) // (DEPTH + 1)), "anti": LIMIT - 1}
    assert all(result.stats.steps == steps.get(proposer, result.stats.steps) for result in results)


@pytest.mark.parametrize("draft", ["self", "anti", "behind", "none"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("offset", [0, 1, 2, 5])
def test_each_row_has_its_own_grammar_which_is_asked_for_the_text_alone(
    tiny_target, oracles, prompts, expected, draft, temperature, offset
):
    ends = frozenset(expected("grammar", temperature, row, row)[offset] for row in range(len(prompts)))

    def fresh() -> Sampling:
        return Sampling(temperature=temperature, seed=SEED, processors=[Grammar(ends)])

    slow = {"limit": LIMIT, "seed": SEED, "eos": ends}
    answers = [oracles.slow_decode(tiny_target, prompt, fresh(), row=row, **slow) for row, prompt in enumerate(prompts)]
    right = oracles.self_draft([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], DEPTH)
    options = {
        "proposer": {
            "self": right,
            "anti": oracles.Scripted(lambda text: [(token + 1) % V for token in right.propose(text)]),
            "behind": oracles.Scripted(lambda text: [*right.propose(text), 5, 6]),
            "none": None,
        }[draft],
        "max_new_tokens": LIMIT,
        "eos_ids": sorted(ends),
    }
    common = fresh()
    results = generate(tiny_target, prompts, sampling=common, **options)
    assert [result.token_ids for result in results] == answers
    assert common.processors[0].length is None  # a batch leaves the user's own alone
    alone, plain = fresh(), fresh()
    assert generate(tiny_target, prompts[0], sampling=alone, **options).token_ids == answers[0]
    oracles.slow_decode(tiny_target, prompts[0], plain, **slow)
    assert vars(alone.processors[0]) == vars(plain.processors[0])  # advanced as far as plain decoding does


def follow(rule, sampler: Sampler, draft: list[int], logits: torch.Tensor) -> list[int]:
    """The tokens a row emits for a chain, without the loop."""
    tokens = [sampler.context[-1], *draft]
    ((path, (*_, token)),) = rule([TokenTree(torch.tensor(tokens), chain_shape(len(tokens)))], logits[None], [sampler])
    return [*tokens[1 : len(path)], token]


NO_REPEATS, PAIR = {"bad_words_ids": [[7, 7]]}, {"bad_words_ids": [[7, 8]]}
TRIPLE = {"bad_words_ids": [[7, 8, 9], [8, 6]]}


@pytest.mark.parametrize(
    ("settings", "prompt", "draft", "accepted"),
    [
        ({}, [1, 2], [7, 7, 7], 3),
        ({"repetition_penalty": 1e9}, [1, 2], [7, 7, 7], 1),
        ({"repetition_penalty": 1e9}, [7, 2], [7, 7, 7], 0),
        ({"presence_penalty": 1e9}, [1, 2], [7, 7, 7], 1),
        ({"presence_penalty": 1e9}, [7, 7], [7, 7, 7], 1),  # the prompt is not counted
        ({"frequency_penalty": 1e9}, [7, 7], [7, 7, 7], 1),
        ({"presence_penalty": 3.0}, [1, 2], [7, 7, 7, 7], 4),  # 9, 6, 6, 6 against 5
        ({"frequency_penalty": 3.0}, [7, 2], [7, 7, 7, 7], 2),  # 9, 6, 3 against 5
        ({"frequency_penalty": -3.0, "presence_penalty": 8.0}, [1, 2], [7, 7, 7], 1),  # 9, 4
        ({"frequency_penalty": -3.0, "presence_penalty": 6.0}, [1, 2], [7, 7, 7], 3),  # 9, 6, 9
        ({"bad_words_ids": [[7]]}, [1, 2], [7, 8], 0),
        ({"bad_words_ids": [[8]]}, [1, 2], [7, 8], 1),
        (PAIR, [1, 2], [7, 8], 1),
        (PAIR, [1, 7], [8], 0),  # the prompt ends in the word's beginning
        (PAIR, [7, 2], [8, 7], 2),
        (PAIR, [1, 7], [6, 8], 2),
        (PAIR, [1, 2], [7, 6, 8], 3),
        (PAIR, [1, 2], [8, 7, 7, 8], 3),
        (NO_REPEATS, [1, 2], [7, 7, 7], 1),
        (NO_REPEATS, [1, 7], [7, 7], 0),
        (NO_REPEATS, [7, 2], [7, 6, 7], 3),
        (TRIPLE, [1, 2], [7, 8, 9], 2),
        (TRIPLE, [7, 8], [9], 0),
        (TRIPLE, [2, 7], [8, 9], 1),
        (TRIPLE, [7, 7], [9, 8, 6], 2),
        ({"bad_words_ids": [[1, 2, 7, 7, 7, 7, 8]]}, [2], [7, 7, 7, 7, 8], 5),  # longer than the text
    ],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_the_path_to_a_node_counts_at_that_node(settings, prompt, draft, accepted, temperature):
    logits = torch.zeros(len(draft) + 1, 12, dtype=torch.float64)
    logits[:, 3] = 5.0
    for node, token in enumerate(draft):
        logits[node, token] = 9.0  # every draft is the favourite, 3 the second
    sampler = Sampler(Sampling(**settings, temperature=temperature, seed=1), 0, prompt)
    assert follow(Match(), sampler, draft, logits) == [*draft[:accepted], 3]


@pytest.mark.parametrize("rule", [Match(), Rejection()], ids=["match", "rejection"])
@pytest.mark.parametrize(
    "settings", [{"min_p": 0.9}, {"top_k": 1}, {"top_p": 0.5}, {"typical_p": 0.5}, {"min_p": 0.8}], ids=str
)
def test_a_draft_that_was_cut_off_is_rejected_under_every_seed(settings, rule):
    logits = torch.full((2, 12), -30.0, dtype=torch.float64)
    logits[:, 7], logits[:, 3] = 1.0, 0.8  # probabilities .55 and .45: 3 is .82 as likely as 7
    kept = settings == {"min_p": 0.8}
    first = {
        follow(rule, Sampler(Sampling(**settings, temperature=1.0, seed=seed), 0, [1]), [3], logits)[0]
        for seed in range(50)
    }
    assert first == ({3, 7} if kept else {7})


def test_a_difference_is_measured_with_the_prompt_apart_and_for_its_row(tiny_target):
    prompt, rows = [5, 6, 8, 214], []

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        rows.append(row)
        return list(range(0, V, 2)) if row == 2 else [1]

    text = [8, 214, 8]
    with torch.no_grad():
        scores = tiny_target.model(torch.tensor([prompt + text]), use_cache=False).logits[0, -1]
    scores[8] += 25.0 + 2 * 5.0
    scores[214] += 25.0 + 5.0
    scores[1::2] = -torch.inf
    best = scores.topk(2)
    assert set(best.indices.tolist()) == {8, 214}
    first, second = ([*text, token] for token in best.indices.tolist())
    sampling = Sampling(presence_penalty=-25.0, frequency_penalty=-5.0, prefix_allowed_tokens_fn=allowed)
    found = first_difference(tiny_target, prompt, first, second, sampling, row=2)
    assert found.gap == pytest.approx(float(best.values[0] - best.values[1]), abs=1e-12)
    assert set(rows) == {2}


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_constraint_is_never_asked_behind_a_draft_that_it_forbids(tiny_target, oracles, prompts, rule, temperature):
    """As a trie of allowed texts, which has no answer there."""
    ends, depth = [50, 90], len(prompts[0])

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        text = ids[depth:].tolist()
        return [] if any(token not in ends for token in text) else ends

    proposer = oracles.Scripted(lambda text: [ends[len(text) % 2], 51, 50])
    sampling = Sampling(temperature=temperature, prefix_allowed_tokens_fn=allowed, seed=SEED)
    options = {"sampling": sampling, "accept": rule, "max_new_tokens": LIMIT, "eos_ids": ()}
    text = generate(tiny_target, prompts[0], proposer=proposer, **options).token_ids
    assert set(text) <= set(ends)
    assert len(text) == LIMIT
