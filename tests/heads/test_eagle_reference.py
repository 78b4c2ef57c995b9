"""EAGLE and EAGLE-3 against their formulas: one text at a time, no cache, every step computed anew from the start.

The pair at position p is the embedding of the token at p + 1 and the feature at p: the target's where it has been
there, else the head's own last output.
"""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, smooth_l1_loss

from decode import Target
from heads import FeatureBatch, Head, create_head, head_class

D, V = 32, 320
SIZES = {
    "hidden_size": D,
    "vocab_size": V,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "rms_norm_eps": 0.01,
    "rope_theta": 5e5,
}
VOCABULARY = torch.arange(3, V, 5)
VARIANTS = {
    "eagle": ("eagle", {}),
    "eagle-draft-vocabulary": ("eagle", {"draft_vocab_size": len(VOCABULARY)}),
    "eagle3": ("eagle3", {}),
    "eagle3-draft-vocabulary": ("eagle3", {"draft_vocab_size": len(VOCABULARY)}),
    "eagle3-shared": ("eagle3", {"draft_vocab_size": len(VOCABULARY), "own_lm_head": False}),
}


class Reference:
    """The head's formulas over its weights."""

    def __init__(self, head: Head, target: Target) -> None:
        self.weights = {**head.state_dict(), **dict(head.named_parameters())}
        self.config = head.config
        self.embedding = target.embed.weight.detach()
        self.vocabulary = self.weights.get("vocabulary", torch.arange(V))
        lent = target.lm_head.weight.detach()[self.vocabulary]
        self.lm_head = self.weights.get("projection.weight", lent)
        self.fused = "norm.weight" in self.weights

    def draft(self, ids: Tensor, states: Tensor, drafted: list[int]) -> tuple[Tensor, Tensor]:
        """[1 + drafted, U] logits and [1 + drafted, D] own features behind a text [n + 1] with states [n, F]."""
        features = states @ self.weights["fc.weight"].T if self.fused else states
        tokens, logits, own = ids[1:], [], []
        for token in [None, *drafted]:
            if token is not None:
                tokens, features = torch.cat([tokens, torch.tensor([token])]), torch.cat([features, own[-1][None]])
            own.append(self.layer(self.embedding[tokens].to(features), features)[-1])
            logits.append(self.lm_head.to(features) @ (self.norm(own[-1], "norm") if self.fused else own[-1]))
        return torch.stack(logits), torch.stack(own)

    def layer(self, embedded: Tensor, features: Tensor) -> Tensor:
        if self.fused:
            inputs = [self.norm(embedded, "layers.0.input_layernorm"), self.norm(features, "layers.0.hidden_norm")]
            residual, entering = features, torch.cat(inputs, dim=-1)
        else:
            residual = entering = torch.cat([embedded, features], dim=-1) @ self.weights["fc.weight"].T
        x = residual + self.attention(entering)
        normed = self.norm(x, "layers.0.post_attention_layernorm")
        gate, up, down = (self.weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return x + (silu(normed @ gate.T) * (normed @ up.T)) @ down.T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.weights[f"{name}.weight"]
        )

    def attention(self, x: Tensor) -> Tensor:
        n, size, group = (
            len(x),
            self.config.head_dim,
            self.config.num_attention_heads // self.config.num_key_value_heads,
        )
        project = lambda name: x @ self.weights[f"layers.0.self_attn.{name}_proj.weight"].T  # noqa: E731
        out = []
        for head in range(self.config.num_attention_heads):
            q = self.rotate(project("q")[:, head * size : (head + 1) * size])
            kept = slice(head // group * size, (head // group + 1) * size)
            k, v = self.rotate(project("k")[:, kept]), project("v")[:, kept]
            future = torch.ones(n, n).triu(1).bool()
            out.append(((q @ k.T) / size**0.5).masked_fill(future, float("-inf")).softmax(-1) @ v)
        return torch.cat(out, dim=-1) @ self.weights["layers.0.self_attn.o_proj.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        """Row p turns by p * theta ** (-2i / E) in the plane of its components i and i + E / 2."""
        half = x.shape[1] // 2
        angles = torch.outer(torch.arange(len(x)), self.config.rope_theta ** -(torch.arange(half).double() / half))
        first, second, cos, sin = x[:, :half], x[:, half:], angles.cos().to(x), angles.sin().to(x)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


@pytest.fixture(scope="module")
def target(make_tiny_llama) -> Target:
    return Target(make_tiny_llama(), name="tiny")


@pytest.fixture(params=VARIANTS)
def head(request, target) -> Head:
    return make_head(request.param, target)


def make_head(variant: str, target: Target, **options) -> Head:
    kind, fields = VARIANTS[variant]
    if kind == "eagle3":
        options = {"feature_layers": (1, 2), **options}
    torch.manual_seed(0)
    head = create_head(kind, head_class(kind).Config(**SIZES, **fields, **options), target).double().eval()
    if "draft_vocab_size" in fields:
        head.set_vocabulary(VOCABULARY)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1)
    return head


class Rows:
    """Random texts, states that the target might have had, and how much of each text is committed."""

    def __init__(self, head: Head, target: Target, length: int, rows: int = 3) -> None:
        generator = torch.Generator().manual_seed(1)
        width = len(head.feature_layers) * D
        self.ids = torch.randint(V, (rows, length), generator=generator)
        self.hidden = torch.randn(rows, length, D, generator=generator).to(head.dtype)
        self.features = torch.randn(rows, length, width, generator=generator).to(head.dtype) if width else None
        self.reference, self.drafter = Reference(deepcopy(head).double(), target), head.drafter()
        self.done = [0] * rows

    def sync(self, lengths: list[int]) -> Tensor:
        """Commit so many tokens more of each row; the text goes on in what pads the shorter ones."""
        spans = [slice(done, done + max(lengths)) for done in self.done]
        ids = torch.stack([self.ids[row, span.start : span.stop + 1] for row, span in enumerate(spans)])
        hidden = torch.stack([self.hidden[row, span] for row, span in enumerate(spans)])
        features = self.features
        if features is not None:
            features = torch.stack([features[row, span] for row, span in enumerate(spans)])
        self.done = [done + length for done, length in zip(self.done, lengths, strict=True)]
        return self.drafter.sync(ids, hidden, lengths, features)

    def keep(self, rows: list[int]) -> None:
        self.drafter.keep(rows)
        self.ids, self.hidden, self.done = self.ids[rows], self.hidden[rows], [self.done[row] for row in rows]
        self.features = None if self.features is None else self.features[rows]

    def expected(self, row: int, path: list[int]) -> Tensor:
        """[U] logits below a path of drafted tokens."""
        n = self.done[row]
        states = (self.hidden if self.features is None else self.features)[row, :n].double()
        return self.reference.draft(self.ids[row, : n + 1], states, path)[0][-1]

    def check_tree(self, widths: list[int], seed: int) -> None:
        """Grow a tree of random tokens and parents, and hold each node's logits against its own path's."""
        generator = torch.Generator().manual_seed(seed)
        paths: list[list[list[int]]] = [[[]] for _ in self.done]
        for width in widths:
            tokens = torch.randint(V, (len(paths), width), generator=generator)
            parents = torch.randint(len(paths[0]), (len(paths), width), generator=generator)
            logits = self.drafter.extend(tokens, parents)
            for row, known in enumerate(paths):
                known += [[*known[p], t] for p, t in zip(parents[row].tolist(), tokens[row].tolist(), strict=True)]
                for node, path in enumerate(known[-width:]):
                    close(logits[row, node], self.expected(row, path))


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_a_greedy_chain_is_the_references(head, target):
    rows = Rows(head, target, 12)
    drafts = [rows.reference.vocabulary[rows.sync([7, 11, 1]).argmax(-1)]]
    for step in range(4):
        logits = rows.drafter.extend(drafts[-1][:, None], torch.full((3, 1), step))
        drafts.append(rows.reference.vocabulary[logits[:, 0].argmax(-1)])
    for row in range(3):
        path: list[int] = []
        for _ in drafts:
            path.append(int(rows.reference.vocabulary[rows.expected(row, path).argmax()]))
        assert path == [int(tokens[row]) for tokens in drafts]


@torch.no_grad()
def test_every_node_of_every_tree_is_the_reference_along_its_path(head, target):
    """Rows of their own lengths, parents at any depth, and commits that take other numbers of tokens in each row."""
    rows = Rows(head, target, 40)
    for seed, lengths in enumerate(([9, 4, 1], [1, 3, 2], [2, 1, 6])):
        for row, logits in enumerate(rows.sync(lengths)):
            close(logits, rows.expected(row, []))
        rows.check_tree([3, 1, 4, 2], seed)
    rows.keep([2, 0])
    for row, logits in enumerate(rows.sync([1, 5])):
        close(logits, rows.expected(row, []))
    rows.keep([1, 0])  # between the root and its tree
    rows.check_tree([2, 3], 4)


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("variant", ["eagle", "eagle3"])
def test_long_texts_in_low_precision_stay_near_the_reference(variant, dtype, tolerance, target):
    """Far behind the 256 positions that the target was made for."""
    head = make_head(variant, target)
    head.layer.self_attn.q_proj.weight.data *= 3  # sharp attention, so that positions matter
    rows = Rows(head.to(dtype), target, 2010, rows=1)
    found, path = [rows.sync([1990])[0], rows.sync([7])[0]], [5, 77, 300]
    for step, token in enumerate(path):
        found.append(rows.drafter.extend(torch.tensor([[token]]), torch.tensor([[step]]))[0, 0])
    states = (rows.hidden if rows.features is None else rows.features)[0].double()
    for logits, expected in zip(
        found[1:], rows.reference.draft(rows.ids[0, :1998], states[:1997], path)[0], strict=True
    ):
        assert (logits - expected).norm() < tolerance * expected.norm()


def make_batch(head: Head, target: Target, lengths: list[int], unsupervised: list[list[int]]) -> FeatureBatch:
    rows = Rows(head, target, max(lengths), len(lengths))
    rows.ids[:, ::2] = VOCABULARY[rows.ids[:, ::2] % len(VOCABULARY)]
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    for row, places in enumerate(unsupervised):
        mask[row, places] = False
    return FeatureBatch(rows.ids, mask, rows.hidden, rows.features)


def brute_force(head: Head, batch: FeatureBatch, target: Target) -> Tensor:
    """Every step of every chain from scratch: features up to p are the target's, those behind it the head's own."""
    config, reference, total = head.config, Reference(head, target), torch.zeros(()).double()
    for ids, mask, hidden, states in zip(
        batch.token_ids,
        batch.loss_mask,
        batch.hidden,
        batch.hidden if batch.features is None else batch.features,
        strict=True,
    ):
        for p in range(len(ids) - 2):
            steps = [k for k in range(config.unroll) if p + 2 + k < len(ids) and mask[p + 1 : p + 3 + k].all()]
            learnt = [k for k in steps if ids[p + 2 + k] in reference.vocabulary]
            if not learnt:
                continue
            logits, own = reference.draft(ids[: p + 2], states[: p + 1], ids[p + 2 : p + 2 + config.unroll].tolist())
            for k in learnt:
                teacher = (target.lm_head.weight[reference.vocabulary] @ hidden[p + 1 + k]).detach().log_softmax(-1)
                kl = (teacher.exp() * (teacher - logits[k].log_softmax(-1))).sum()
                total = total + config.losses["kl"] * config.depth_decay**k * kl
            for k in [k for k in range(config.unroll) if mask[p + 1 : p + 2 + k].all() and p + 1 + k < len(ids)]:
                if head.kind == "eagle":
                    distance = smooth_l1_loss(own[k], hidden[p + 1 + k])
                    total = total + config.feature_weight * config.depth_decay**k * distance
    return total


@pytest.mark.parametrize("unroll", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_training_loss_and_its_gradient_are_the_brute_forces(variant, unroll, target):
    options = {"feature_weight": 0.4} if VARIANTS[variant][0] == "eagle" else {}
    head = make_head(variant, target, unroll=unroll, depth_decay=0.75, losses={"kl": 0.6}, **options)
    batch = make_batch(head, target, [14, 9, 6], [[0, 1, 7], [3], [5]])
    found, expected = head(batch).loss, brute_force(head, batch, target)
    close(found, expected)
    parameters = list(head.parameters())
    for ours, theirs in zip(
        torch.autograd.grad(found, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        assert theirs.abs().max() > 1e-6
        close(ours, theirs)


def test_features_are_not_learnt_across_unsupervised_tokens(target):
    """As little as tokens are: in decoding no chain goes on behind the end of an answer."""
    head = make_head("eagle", target, unroll=5)
    batch = make_batch(head, target, [12], [[0, 5]])
    runs = []
    for places in (slice(1, 5), slice(6, 12)):
        mask = torch.zeros_like(batch.loss_mask)
        mask[:, places] = True
        runs.append(head(replace(batch, loss_mask=mask)).loss)
    close(head(batch).loss, sum(runs))
