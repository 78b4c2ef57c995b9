"""The draft model's cache: after every sync that of a fresh prefill, with every level's logits those of a full pass."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, MistralConfig

from decode import Chain, Drafting, DraftModel, PromptLookup, Sampling, StaticTree, Target, generate
from decode.draft_model import DraftModelDrafter
from decode.tree import TokenTree, chain_shape

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOW = 5
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "mistral-window": MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=WINDOW),
    "gemma3-window": Gemma3TextConfig(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=WINDOW),
    "gpt-neox": GPTNeoXConfig(**SIZES),
    "gpt2": GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=0, eos_token_id=1),
}
TOLERANCE = {"sdpa": 1e-9, "eager": 1e-5}  # eager attention takes its softmax in float32


def make_model(name: str, attention: str = "sdpa", seed: int = 0) -> Target:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).double()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return Target(model)


def full_logits(model: Target, text: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]


@dataclass
class Row:
    """One text, its root last, and the nodes drafted below the root."""

    text: list[int]
    paths: list[list[int]] = field(default_factory=list)
    """Tokens below the root down to each node given to `extend`, in the drafter's order."""


class Driver:
    """Plays the loop against one drafter and compares everything with plain forwards of the draft model."""

    def __init__(self, model: Target, rows: int, seed: int, tolerance: float) -> None:
        self.model = model
        self.chance = random.Random(seed)
        self.tolerance = tolerance
        self.rows = [Row(self.tokens(self.chance.randint(2, 9))) for _ in range(rows)]
        self.drafter = DraftModel(model, model).drafter()
        self.sync([row.text for row in self.rows])

    def tokens(self, number: int) -> list[int]:
        return [self.chance.randrange(2, 61) for _ in range(number)]

    def sync(self, committed: list[list[int]]) -> None:
        """Hand over texts that open with the old root (or are whole) and check logits and cache."""
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(text) for text in committed], batch_first=True)
        lengths = [len(text) - 1 for text in committed]
        logits = self.drafter.sync(ids, torch.empty(len(ids), max(lengths), 0), lengths)
        for row, given in zip(self.rows, logits, strict=True):
            self.equal(given, full_logits(self.model, row.text))
        check_cache(self.drafter, [row.text for row in self.rows], self.tolerance)
        if len(self.rows) == 1 or len(set(self.drafter._session.lengths)) > 1:  # rows that part would meet the NaN
            with torch.inference_mode():
                self.drafter._session.cache.poison()

    def equal(self, a: torch.Tensor, b: torch.Tensor) -> None:
        torch.testing.assert_close(a, b, atol=self.tolerance, rtol=self.tolerance)

    def grow(self, depth: int) -> None:
        """Add `depth` levels of random width; nodes of a level hang below any of the level above."""
        level = [[0] for _ in self.rows]
        for row in self.rows:
            row.paths = []
        for _ in range(depth):
            width = self.chance.randint(1, 3)
            parents = [[self.chance.choice(nodes) for _ in range(width)] for nodes in level]
            # few different tokens, so that siblings are sometimes the same
            tokens = [[self.chance.choice((7, 8, 9)) for _ in range(width)] for _ in self.rows]
            logits = self.drafter.extend(torch.tensor(tokens), torch.tensor(parents))
            for b, row in enumerate(self.rows):
                above = [[], *row.paths]
                level[b] = list(range(len(above), len(above) + width))
                row.paths += [[*above[p], t] for p, t in zip(parents[b], tokens[b], strict=True)]
                for w, path in enumerate(row.paths[-width:]):
                    self.equal(logits[b, w], full_logits(self.model, row.text + path))

    def commit(self) -> None:
        """Accept all of a path, a part, or nothing, in each row, and a token that may or may not have been drafted."""
        committed = []
        for row in self.rows:
            path = self.chance.choice(row.paths or [[]])
            kept = path[: self.chance.choice((0, len(path), self.chance.randint(0, len(path))))]
            block = [*kept, *self.tokens(self.chance.choice((0, 0, 2))), *self.chance.choice(([7], self.tokens(1)))]
            committed.append([row.text[-1], *block])
            row.text = row.text + block
            row.paths = []
        self.sync(committed)

    def end_one(self) -> None:
        kept = self.chance.sample(range(len(self.rows)), len(self.rows) - 1)
        self.drafter.keep(kept)
        self.rows = [self.rows[b] for b in kept]
        check_cache(self.drafter, [row.text for row in self.rows], self.tolerance)


def check_cache(drafter: DraftModelDrafter, texts: list[list[int]], tolerance: float = 1e-9) -> None:
    """Compare with a prefill of each whole text, the root included."""
    cache = drafter._session.cache
    assert cache.lengths == [len(text) for text in texts]
    for b, text in enumerate(texts):
        fresh = drafter._model.session(1, len(text))
        fresh.prefill([text])
        for held, expected in zip(cache.contents(b), fresh.cache.contents(0), strict=True):
            torch.testing.assert_close(held, expected, atol=tolerance, rtol=tolerance)


CASES = [(name, "sdpa", seed) for name in CONFIGS for seed in (0, 1)] + [(n, "eager", 2) for n in ("llama", "gpt2")]


@pytest.mark.parametrize(("name", "attention", "seed"), CASES)
def test_random_trees_and_commits_give_the_logits_of_full_passes_and_the_cache_of_a_prefill(name, attention, seed):
    """Dropped slots are NaN throughout (or huge, where rows differ in length)."""
    driver = Driver(make_model(name, attention), 1 + 2 * (seed % 2), seed, TOLERANCE[attention])
    for depth in (2, 0, 3, 1, 0, 0, 4, 2):
        driver.grow(depth)
        driver.commit()
        if depth in (1, 4) and len(driver.rows) > 1:
            driver.end_one()
    assert max(len(row.text) for row in driver.rows) > 2 * WINDOW


def test_rows_of_one_length_are_poisoned_with_nan_and_nothing_notices():
    driver = Driver(make_model("llama"), 1, 5, 1e-9)
    driver.grow(3)
    driver.commit()
    cache = driver.drafter._session.cache
    assert all(block[:, :, cache.lengths[0] :].isnan().all() for block in (*cache._keys, *cache._values))
    driver.grow(2)


def test_a_path_through_the_second_of_two_equal_siblings_is_found():
    """The drafter may have both; whichever it keeps, the cache is right."""
    model = make_model("llama")
    drafter = DraftModel(model, model).drafter()
    drafter.sync(torch.tensor([[5, 6]]), torch.empty(1, 1, 0), [1])
    drafter.extend(torch.tensor([[7, 7]]), torch.tensor([[0, 0]]))
    drafter.extend(torch.tensor([[8, 9]]), torch.tensor([[1, 2]]))
    drafter.sync(torch.tensor([[6, 7, 9, 10]]), torch.empty(1, 3, 0), [3])
    check_cache(drafter, [[5, 6, 7, 9, 10]])


def widths_of(model: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many tokens each pass of `model` is fed."""
    fed: list[int] = []
    forward = Target.forward

    def record(self, token_ids, *rest):
        if self is model:
            fed.append(token_ids.shape[1])
        return forward(self, token_ids, *rest)

    monkeypatch.setattr(Target, "forward", record)
    return fed


@pytest.mark.parametrize("right", [True, False])
def test_accepted_tokens_are_not_fed_again(tiny_target, make_tiny_llama, monkeypatch, right):
    model = Target(make_tiny_llama(), tiny_target.tokenizer)
    if not right:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(1, 0))  # always one id beside the target's
    draft = DraftModel(model, tiny_target)
    fed = widths_of(model, monkeypatch)
    result = generate(tiny_target, [5, 6, 7], draft_model=draft, grow=Chain(3), max_new_tokens=13, eos_ids=())
    # the prompt with its first root, then the root and the levels above the leaves; the leaf was never fed
    sync = 2 if right else 1
    steps = 3 if right else 12
    assert result.stats.steps == steps
    assert fed == [4, 1, 1] + [sync, 1, 1] * (steps - 1)


def test_a_chain_of_one_token_never_extends_and_still_has_room(tiny_target, make_tiny_llama, monkeypatch):
    model = Target(make_tiny_llama(seed=5), tiny_target.tokenizer)
    fed = widths_of(model, monkeypatch)
    draft = DraftModel(model, tiny_target)
    generate(tiny_target, [5], draft_model=draft, grow=Chain(1), max_new_tokens=40, eos_ids=(), check=True)
    assert fed[0] == 2
    assert fed.count(1) > 20


@dataclass(frozen=True)
class Scheduled:
    """The trees of a drafting for some steps, no drafts or another proposer's for others; checks after every sync."""

    drafting: Drafting
    plan: Callable[[int], str]
    max_nodes: int = 12
    feature_layers: tuple[int, ...] = ()
    seen: list[str] = field(default_factory=list)

    def begin(self, rows: int, *, shared_noise: bool) -> "Scheduling":
        inner = self.drafting.begin(rows, shared_noise=shared_noise)
        return Scheduling(self, inner, PromptLookup(length=3).begin(rows, shared_noise=shared_noise))


@dataclass
class Scheduling:
    settings: Scheduled
    inner: object
    lookup: object
    texts: list[list[int]] = field(default_factory=list)

    def sync(self, token_ids, hidden, lengths, features=None) -> None:
        self.inner.sync(token_ids, hidden, lengths)
        self.texts = self.texts or [[] for _ in lengths]
        for text, ids, length in zip(self.texts, token_ids.tolist(), lengths, strict=True):
            text[max(len(text) - 1, 0) :] = ids[: length + 1]
        check_cache(self.inner._drafter, self.texts)

    def propose(self, roots, rows) -> list[TokenTree]:
        step = self.settings.plan(len(self.settings.seen))
        self.settings.seen.append(step)
        if step == "none":
            return [TokenTree(root[None], chain_shape(1)) for root in roots]
        drafted = self.inner.propose(roots, rows)
        return self.lookup.propose(roots, rows) if step == "lookup" else drafted

    def keep(self, rows) -> None:
        self.inner.keep(rows)
        self.lookup.keep(rows)
        self.texts = [self.texts[row] for row in rows]
        check_cache(self.inner._drafter, self.texts)

    def check(self, rows, hidden, features=None) -> None:
        self.inner.check(rows, hidden)


@pytest.mark.parametrize("draft", ["itself", "rounded", "other"])
@pytest.mark.parametrize("schedule", [("draft", "none", "draft"), ("none", "draft", "lookup", "draft", "draft")])
def test_steps_without_drafts_and_with_others_leave_the_cache_in_step(
    tiny_target, make_tiny_llama, prompts, draft, schedule
):
    model = Target(make_tiny_llama(seed=9 if draft == "other" else 0), tiny_target.tokenizer)
    if draft == "rounded":
        model.model.bfloat16().double()
    drafts = DraftModel(model, tiny_target)
    tree = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
    for grow, rows in ((Chain(3), prompts), (tree, prompts), (tree, prompts[:1])):
        plain = generate(tiny_target, rows, sampling=Sampling(temperature=0.6, seed=2), max_new_tokens=14)
        proposer = Scheduled(Drafting(drafts, grow), lambda step: schedule[step % len(schedule)])
        results = generate(
            tiny_target, rows, proposer=proposer, sampling=Sampling(temperature=0.6, seed=2), max_new_tokens=14
        )
        assert [r.token_ids for r in results] == [r.token_ids for r in plain]
        assert set(proposer.seen) == set(schedule)
