"""EAGLE and EAGLE-3 against transformers' Llama layer, their inputs in real decoding, and EAGLE's noise."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

from decode import DynamicTree, Target, generate
from heads import Drafter, FeatureBatch, Head, create_head, head_class
from heads.layers import RMSNorm
from train.eagle import default_layers
from train.new_head import target_sizes

LAYERS, D, V = 9, 16, 90
SHAPE = {
    "hidden_size": D,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}


@pytest.fixture(scope="module")
def target() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, vocab_size=V, num_hidden_layers=LAYERS, initializer_range=0.3)
    return Target(LlamaForCausalLM(config).double(), name="deep")


def make_head(kind: str, target: Target, **options) -> Head:
    options |= {"feature_layers": default_layers(target)} if kind == "eagle3" else {}
    config = head_class(kind).Config
    torch.manual_seed(1)
    head = create_head(kind, config(**options, **target_sizes(target, config)), target).double().eval()
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1)
    return head


class Transformers:
    """The heads, as the engines build them of transformers' parts."""

    def __init__(self, head: Head, target: Target) -> None:
        config = LlamaConfig(**SHAPE, attn_implementation="sdpa")
        self.kind, self.fc, self.lm_head, self.embed = head.kind, head.fc, target.lm_head, target.embed
        self.rotary, self.layer = LlamaRotaryEmbedding(config), LlamaDecoderLayer(config, 0).double()
        weights = {name.removeprefix("layers.0."): w for name, w in head.state_dict().items() if "layers.0" in name}
        if head.kind == "eagle":
            self.layer.input_layernorm = nn.Identity()
        else:
            self.layer.hidden_norm = LlamaRMSNorm(D, SHAPE["rms_norm_eps"])
            for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 2)):
                setattr(self.layer.self_attn, name, nn.Linear(2 * D, heads * SHAPE["head_dim"], bias=False))
            self.norm_before_residual = head.config.norm_before_residual
            self.norm, self.lm_head = LlamaRMSNorm(D, SHAPE["rms_norm_eps"]), nn.Linear(D, V, bias=False)
            self.norm.weight.data, self.lm_head.weight.data = head.norm.weight.data, head.projection.weight.data
        self.layer.load_state_dict(weights, strict=True)
        self.layer.double()

    def run(self, tokens: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """[U] logits and [D] feature behind the pairs [n], [n, D]."""
        embedded, features = self.embed(tokens)[None], features[None]
        places = self.rotary(features, torch.arange(len(tokens))[None])
        if self.kind == "eagle":
            x = self.layer(self.fc(torch.cat([embedded, features], dim=-1)), position_embeddings=places)
            return self.lm_head(x[0, -1]), x[0, -1]
        pair = torch.cat([self.layer.input_layernorm(embedded), self.layer.hidden_norm(features)], dim=-1)
        residual = self.layer.hidden_norm(features) if self.norm_before_residual else features
        x = residual + self.layer.self_attn(pair, position_embeddings=places)[0]
        x = x + self.layer.mlp(self.layer.post_attention_layernorm(x))
        return self.lm_head(self.norm(x[0, -1])), x[0, -1]


def states_of(target: Target, ids: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' own final states [n, D], and the outputs of layers 2, n // 2 and n - 3 side by side."""
    with torch.no_grad():
        states = target.model(ids[None], output_hidden_states=True).hidden_states
    assert len(states) == LAYERS + 1
    return states[-1][0], torch.cat([states[2], states[4], states[6]], dim=-1)[0]


class Recorded:
    """A drafter, each sync of which is held against transformers' states of the text so far."""

    def __init__(self, head: Head, target: Target, drafter: Drafter, rows: int) -> None:
        self.head, self.target, self.inner, self.reference = head, target, drafter, Transformers(head, target)
        self.max_depth, self.vocab_size, self.vocabulary = drafter.max_depth, V, None
        self.extend = drafter.extend
        self.texts: list[list[int]] = [[] for _ in range(rows)]
        self.taken: list[int] = []

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        logits = self.inner.sync(token_ids, hidden, lengths, features)
        self.taken += lengths
        for row, length in enumerate(lengths):
            self.texts[row] += token_ids[row, :length].tolist()
            ids = torch.tensor([*self.texts[row], int(token_ids[row, length])])
            final, inner = states_of(self.target, ids[:-1])
            near(hidden[row, :length], final[-length:])
            if self.head.kind == "eagle3":
                near(features[row, :length], inner[-length:])
            near(logits[row], self.reference.run(ids[1:], self.head.fuse(final, inner))[0])
        return logits

    def keep(self, rows: Sequence[int]) -> None:
        self.inner.keep(rows)
        self.texts = [self.texts[row] for row in rows]


def near(found: Tensor, expected: Tensor) -> None:
    """transformers' norms, rotations and softmax are in float32."""
    torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle", {}), ("eagle", {"fc_bias": True}), ("eagle3", {}), ("eagle3", {"norm_before_residual": True})],
)
@torch.no_grad()
def test_drafts_are_those_of_transformers_own_layer(kind, options, target):
    head, generator = make_head(kind, target, **options), torch.Generator().manual_seed(2)
    reference, drafter = Transformers(head, target), head.drafter()
    ids = torch.randint(V, (40,), generator=generator)
    final, inner = states_of(target, ids[:-1])
    features, tokens = head.fuse(final, inner), ids[1:]
    logits = drafter.sync(ids[None], final[None], [39], inner[None])[0]
    for step in range(5):
        expected, own = reference.run(tokens, features)
        near(logits, expected)
        token = expected.argmax()[None]
        logits = drafter.extend(token[None], torch.tensor([[step]]))[0, 0]
        tokens, features = torch.cat([tokens, token]), torch.cat([features, own[None]])


def test_norms_are_computed_as_in_transformers_in_bfloat16():
    torch.manual_seed(0)
    ours, theirs = RMSNorm(D, 1e-3).bfloat16(), LlamaRMSNorm(D, 1e-3).bfloat16()
    ours.weight.data = theirs.weight.data = torch.randn(D).bfloat16()
    x = torch.randn(50, D).bfloat16()
    assert torch.equal(ours(x), theirs(x))


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_in_real_decoding_tokens_states_and_layers_stand_where_transformers_has_them(kind, target, monkeypatch):
    """Layers are 2, n // 2 and n - 3 in transformers' numbers, where 0 is the embedding."""
    head = make_head(kind, target)
    made: list[Recorded] = []
    inner = head.drafter

    def drafter() -> Recorded:
        made.append(Recorded(head, target, inner(), rows=3))
        return made[-1]

    monkeypatch.setattr(head, "drafter", drafter)
    prompts = [[5, 6, 7, 8, 9], [3, 4], [40, 50, 60]]
    generate(target, prompts, head=head, grow=DynamicTree(2, 30, 60), max_new_tokens=20, eos_ids=[85])
    (recorded,) = (drafter for drafter in made if drafter.taken)
    assert len(recorded.texts) < 3  # a row has met the end token and been dropped
    assert max(recorded.taken[3:]) > 1  # and some drafts were right


def noise_of(head: Head, hidden: Tensor) -> Tensor:
    """What training adds to the target's states, as the head's first layer sees it."""
    seen: list[Tensor] = []
    handle = head.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    ids = torch.arange(hidden.shape[0] * hidden.shape[1]).reshape(hidden.shape[:2]) % V
    head(FeatureBatch(ids, torch.ones_like(ids, dtype=torch.bool), hidden))
    handle.remove()
    torch.testing.assert_close(seen[0][..., :D], head.embed(ids)[:, 1:].detach())
    return seen[0][..., D:] - hidden[:, :-1]


def test_noise_is_uniform_of_the_same_range_for_all_texts(target):
    head = make_head("eagle", target)
    torch.manual_seed(0)
    hidden = torch.randn(3, 201, D, dtype=torch.float64)
    assert not noise_of(head, hidden).any()
    noise = noise_of(head.train(), hidden)
    largest = 0.2 / 2
    assert largest * 0.999 < noise.abs().max() <= largest
    torch.testing.assert_close(noise.std(), torch.tensor(2 * largest / 12**0.5).double(), rtol=0.03, atol=0)
    assert noise.mean().abs() < 0.02 * largest
    assert noise.unique().numel() == noise.numel()
    assert not torch.equal(noise_of(head, hidden), noise)


def test_the_teacher_is_clean(target):
    """A head that sees nothing has the same loss with noise and without: both losses compare with the true states."""
    head = make_head("eagle", target)
    batch = FeatureBatch(torch.arange(60).reshape(3, 20), torch.ones(3, 20).bool(), torch.randn(3, 20, D).double())
    assert head.train()(batch).loss != head.eval()(batch).loss
    head.fc.weight.data.zero_()
    assert head.train()(batch).loss == head.eval()(batch).loss > 0
