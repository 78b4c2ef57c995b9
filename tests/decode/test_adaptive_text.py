"""Whatever a controller changes to, and when: the text is plain decoding's, and the drafter knows what it should."""

import importlib
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import decode.adaptive
import heads
from decode import Chain, DraftModel, DynamicTree, Sampling, StaticTree, Target, generate
from decode.adaptive import Adaptive, AdaptiveState, Arm, Control
from decode.propose import DraftingState
from heads import FeatureBatch, create_head, head_class
from train.new_head import target_sizes

KINDS = sorted(
    path.stem
    for path in Path(heads.__file__).parent.glob("*.py")
    if "HEAD" in vars(importlib.import_module(f"heads.{path.stem}"))
)
OPTIONS = {
    "medusa": [{"num_heads": 3}],
    "hydra": [{"num_heads": 3, "num_layers": 2}, {"num_heads": 3, "prefix_layer": True}],
    "eagle": [{"max_depth": 3, "feature_weight": 0.0}],
    "eagle3": [{"max_depth": 4, "unroll": 3, "feature_layers": (1, 2)}, {"max_depth": 3, "feature_layers": (2,)}],
}
CASES = [(kind, options) for kind in KINDS for options in OPTIONS.get(kind, [{}])] + [("draft model", {})]
GROWS = (
    Chain(1),
    Chain(3),
    StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0))),
    DynamicTree(3, 3, 9),
    DynamicTree(3, 2, 7, confidence=0.1),
)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, seed=3)}


class Restless(Control):
    """Takes an arm at random for one step, or none for several."""

    def __init__(self, settings: Adaptive, seed: int) -> None:
        super().__init__(settings)
        self.chance, self.rest = random.Random(seed), 3  # nothing is drafted right after the prompt
        self.used: list[Arm | None] = []

    def choose(self, rows: int) -> Arm | None:
        super().choose(rows)
        if self.rest == 0 and self.chance.random() < 0.3:
            self.rest = self.chance.choice((1, 2, 6))
        self._used = None if self.rest else self.chance.choice(self._settings.arms)
        self.rest = max(0, self.rest - 1)
        self.used.append(self._used)
        return self._used


def arms(costs: dict[int, float]) -> tuple[Arm, ...]:
    return tuple(Arm(grow, costs, (0.5, 0.3, 0.2)[: grow.depth]) for grow in GROWS)


@pytest.fixture(scope="module", params=CASES, ids=[f"{kind}-{n}" for n, (kind, _) in enumerate(CASES)])
def drafts(request, tiny_target, tiny_tokenizer, make_tiny_llama, oracles, prompts):
    """A head trained for seconds on some of the target's texts, or a model that is nearly the target."""
    kind, options = request.param
    torch.manual_seed(0)
    if kind == "draft model":
        model = make_tiny_llama()
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.05
        return DraftModel(Target(model, tiny_tokenizer, name="nearly"), tiny_target)
    config = head_class(kind).Config
    head = create_head(
        kind, config(**options, losses={"ce": 1.0}, **target_sizes(tiny_target, config)), tiny_target
    ).double()
    texts = [torch.tensor(p + oracles.slow_decode(tiny_target, p, Sampling(), 20)) for p in prompts[:2]]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.arange(ids.shape[1]) < torch.tensor([[len(text)] for text in texts])
    hidden, features = tiny_target.encode_features(ids, list(map(len, texts)), head.feature_layers)
    batch = FeatureBatch(ids, mask, hidden, features)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.02)
    for _ in range(40):
        optimizer.zero_grad()
        head(batch).loss.div(100).backward()
        optimizer.step()
    return head.eval()


@pytest.fixture(scope="module")
def plain(tiny_target, prompts):
    """Plain decoding's results with ends at many places, by sampling; options first."""

    def decoded(options):
        return [(out.token_ids, out.text, out.finish_reason) for out in generate(tiny_target, prompts, **options)]

    found = {}
    for name, sampling in SAMPLINGS.items():
        options = {"sampling": sampling, "eos_ids": (), "max_new_tokens": 26}
        whole = decoded(options)
        pieces = [whole[row][1][place : place + 2] for row, place in ((0, 9), (2, 24))]
        ends = [whole[row][0][place] for row, place in ((0, 7), (1, 14), (3, 22))]
        asked = [{**options, "stop": pieces}, {**options, "eos_ids": ends}]
        asked += [{**options, "max_new_tokens": limit} for limit in (1, 2, 3)]
        found[name] = [(some, decoded(some)) for some in asked]
        assert {reason for _, results in found[name] for *_, reason in results} == {"stop", "eos", "length"}
    return found


class Watched(AdaptiveState):
    """Compares the drafter and its trees with a fresh one's whenever it has drafted."""

    target: Target
    log: list[tuple[int, int, bool]]
    """For each step: rows, plain steps before it since something was drafted, whether something was drafted."""

    def propose(self, roots, rows):
        waited, known = len(self._pending), bool(self._drafting.started)
        trees = super().propose(roots, rows)
        drafted, arm = not self._pending, self._control._used
        assert drafted == (arm is not None)
        self.log.append((len(rows), waited - known, drafted))
        if not drafted:
            assert {tree.shape.size for tree in trees} == {1}
            return trees
        texts = [torch.tensor(row.context) for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
        sizes = [len(text) - 1 for text in texts]
        layers = self._drafting._head.feature_layers
        hidden, features = self.target.encode_features(ids[:, : max(sizes)], sizes, layers)
        self._drafting.check(rows, hidden, features)
        fresh = DraftingState(self._drafting._head, arm.grow, self._drafting._shared_noise)
        fresh.sync(ids, hidden, sizes, features)
        for tree, expected in zip(trees, fresh.propose(roots, rows), strict=True):
            assert tree.shape.parents == expected.shape.parents
            assert torch.equal(tree.token_ids, expected.token_ids)
        return trees


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("watch", ["check", "drafter"])
def test_the_text_is_plain_decodings_although_the_arm_changes_in_every_step(
    tiny_target, drafts, prompts, plain, monkeypatch, name, watch
):
    controls, log = [], []
    monkeypatch.setattr(
        decode.adaptive,
        "Control",
        lambda settings: controls.append(Restless(settings, len(controls))) or controls[-1],
    )
    if watch == "drafter":
        monkeypatch.setattr(Watched, "target", tiny_target, raising=False)
        monkeypatch.setattr(Watched, "log", log, raising=False)
        monkeypatch.setattr(decode.adaptive, "AdaptiveState", Watched)
    proposer = Adaptive(drafts, arms({1: 1.2}))
    accepted = 0
    for options, expected in plain[name]:
        out = generate(tiny_target, prompts, proposer=proposer, check=watch == "check", **options)
        assert [(result.token_ids, result.text, result.finish_reason) for result in out] == expected
        accepted += sum(sum(result.stats.accepted) for result in out)
    assert accepted > 10 or name == "sampled"
    assert {arm and arm.grow for control in controls for arm in control.used} == {None, *GROWS}
    assert len(controls) == len(plain[name])
    if watch == "drafter":
        assert {rows for rows, _, drafted in log if drafted} >= {2, 5}
        assert max(waited for _, waited, drafted in log if drafted) >= 6


@pytest.mark.parametrize("name", SAMPLINGS)
def test_arms_that_change_with_the_rows_leave_the_text_as_it_is(tiny_target, drafts, prompts, plain, monkeypatch, name):
    """Five rows draft nothing, four a tree, three nothing, two a chain, one a dynamic tree."""
    used: list[tuple[int, Arm | None]] = []
    choose = Control.choose

    def record(self, rows):
        arm = choose(self, rows)
        used.append((rows, arm))
        return arm

    monkeypatch.setattr(Control, "choose", record)
    by_rows = {GROWS[2]: 4, GROWS[1]: 2, GROWS[3]: 1}
    made = tuple(
        Arm(grow, {r: 0.5 if r == rows else 9.0 for r in range(1, 6)}, (0.5, 0.3, 0.2))
        for grow, rows in by_rows.items()
    )
    proposer = Adaptive(drafts, made, pause=64, prior=1000.0)
    for options, expected in plain[name][:2]:
        out = generate(tiny_target, prompts, proposer=proposer, **options)
        assert [(result.token_ids, result.text, result.finish_reason) for result in out] == expected
    grows = {rows: {arm and arm.grow for r, arm in used if r == rows} for rows, _ in used}
    assert len(grows) >= 4
    assert all(grows[rows] == {grow} for grow, rows in by_rows.items() if rows in grows)
    assert all(grows[rows] == {None} for rows in (5, 3) if rows in grows)


class Spied(AdaptiveState):
    """Sums up what waits for the drafter: places of the text, each with tensors of its own."""

    def propose(self, roots, rows):
        trees = super().propose(roots, rows)
        for piece in self._pending:
            tensors = [t for t in (piece.token_ids, piece.hidden, piece.features) if t is not None]
            assert all(len(t) == len(rows) == len(piece.lengths) for t in tensors)
            assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in tensors)
        self.waiting.append((len(rows), sum(piece.hidden.shape[1] for piece in self._pending)))
        return trees


def test_what_waits_for_the_drafter_is_the_text_and_no_more(tiny_target, drafts, prompts, monkeypatch):
    """Nothing is drafted for 20 steps, then all is told in two pieces; the longest prompt's row leaves before."""
    waiting, synced = [], []
    sync = DraftingState.sync

    def record(self, token_ids, hidden, lengths, *features):
        synced.append((tuple(token_ids.shape), list(lengths)))
        sync(self, token_ids, hidden, lengths, *features)

    monkeypatch.setattr(Spied, "waiting", waiting, raising=False)
    monkeypatch.setattr(DraftingState, "sync", record)
    monkeypatch.setattr(decode.adaptive, "AdaptiveState", Spied)
    proposer = Adaptive(drafts, (Arm(Chain(3), {1: 9.0}, (0.1,)),), pause=20)
    plain = [out.token_ids for out in generate(tiny_target, prompts, max_new_tokens=26, eos_ids=())]
    end = next(token for token in plain[3][2:] if not any(token in plain[row][:23] for row in (0, 1, 2, 4)))
    out = generate(tiny_target, prompts, proposer=proposer, max_new_tokens=26, eos_ids=(end,))
    left, rest = plain[3].index(end), [len(prompts[row]) for row in (0, 1, 2, 4)]
    assert [result.token_ids for result in out] == [*plain[:3], plain[3][: left + 1], plain[4]]
    places = [max(map(len, prompts)) if step < left else max(rest) for step in range(20)]
    assert waiting[:20] == [(5 if step < left else 4, place + step) for step, place in enumerate(places)]
    assert waiting[20] == (4, 0)
    assert synced[:2] == [((4, max(rest) + 1), rest), ((4, 21), [20] * 4)]


def test_the_largest_arm_has_room_and_the_heads_layers_are_recorded(tiny_target, drafts):
    proposer = Adaptive(drafts, arms({1: 1.2}))
    assert proposer.max_nodes == max(grow.max_nodes for grow in GROWS) == 9
    assert proposer.feature_layers == drafts.feature_layers
    full = [3 + n % 50 for n in range(tiny_target.max_length - 6)]
    options = {"max_new_tokens": 6, "eos_ids": ()}
    for arm in proposer.arms:
        out = generate(tiny_target, full, proposer=replace(proposer, arms=(arm,)), check=True, **options)
        assert out.token_ids == generate(tiny_target, full, **options).token_ids
