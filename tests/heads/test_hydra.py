"""Hydra heads: the loss is its definition, an untrained head repeats the target, and each node sees its own tokens."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaModel

from heads import FeatureBatch, create_head
from heads.hydra import HydraConfig, HydraHead

D, V = 32, 320
VOCABULARY = torch.tensor([1, 3, 4, 7, 20, 50, 119, 200, 319])
SIZES = {
    "hidden_size": D,
    "vocab_size": V,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}


def make_head(target, *, vocabulary=None, random: float = 0.05, **options) -> HydraHead:
    torch.manual_seed(1)
    size = None if vocabulary is None else len(vocabulary)
    head = create_head("hydra", HydraConfig(**SIZES, draft_vocab_size=size, **options), target)
    assert isinstance(head, HydraHead)
    if vocabulary is not None:
        head.set_vocabulary(vocabulary)
    for parameter in head.parameters():
        parameter.data += torch.randn_like(parameter) * random
    return head.double().eval()


def make_batch(lengths=(11, 7, 2, 1), *, vocabulary=None) -> FeatureBatch:
    """Rows with padding, masks with gaps, a supervised first token, and random states."""
    generator = torch.Generator().manual_seed(0)
    rows, longest = len(lengths), max(lengths)
    ids = torch.randint(0, V, (rows, longest), generator=generator)
    if vocabulary is not None:  # about half of the tokens can be drafted
        drafted = vocabulary[torch.randint(0, len(vocabulary), (rows, longest), generator=generator)]
        ids = torch.where(torch.rand(rows, longest, generator=generator) < 0.6, drafted, ids)
    mask = torch.rand(rows, longest, generator=generator) < 0.85
    mask[:, 0] = True
    for row, length in enumerate(lengths):
        mask[row, length:] = False
    return FeatureBatch(ids, mask, torch.randn(rows, longest, D, generator=generator, dtype=torch.float64))


def read_text(head: HydraHead, hidden: torch.Tensor) -> torch.Tensor:
    """[T, D] states as the heads are given them: through Hugging Face's layer with the prefix layer's weights."""
    if head.prefix is None:
        return hidden
    sizes = {name: value for name, value in SIZES.items() if name != "rope_theta"}
    rope = {"rope_theta": SIZES["rope_theta"], "rope_type": "default"}
    llama = LlamaModel(LlamaConfig(num_hidden_layers=1, rope_parameters=rope, **sizes)).double()
    llama.norm = nn.Identity()
    weights = {f"layers.0.{name}": parameter for name, parameter in head.prefix.named_parameters()}
    assert set(weights) == {name for name, _ in llama.named_parameters() if name.startswith("layers")}
    return torch.func.functional_call(llama, weights, kwargs={"inputs_embeds": hidden[None]}).last_hidden_state[0]


def run_head(head: HydraHead, state: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """[D] state and the tokens after it -> [U], written out again from the paper."""
    first, *further = head.blocks[len(tokens) - 1]
    x = torch.cat([state, *(head.embed.weight[token].detach() for token in tokens)])
    x = (
        first.res_connection.weight @ x
        + first.res_connection.bias
        + F.silu(first.linear.weight @ x + first.linear.bias)
    )
    for block in further:
        x = x + F.silu(block.linear.weight @ x + block.linear.bias)
    weight = head.lm_head.weight.detach()
    return (weight if head.vocabulary is None else weight[head.vocabulary]) @ x


def slow_loss(head: HydraHead, batch: FeatureBatch, ce: float, kl: float):
    """The loss and metrics by loops over rows, labels and heads, from the definition in `HydraHead.forward`."""
    config, columns = head.config, list(range(V)) if head.vocabulary is None else head.vocabulary.tolist()
    loss = torch.zeros((), dtype=torch.float64)
    metrics = {f"depth{k + 1}/{name}": [0.0, 0] for k in range(config.num_heads) for name in ("loss", "top1")}
    for ids, mask, hidden in zip(batch.token_ids.tolist(), batch.loss_mask, batch.hidden, strict=True):
        states = read_text(head, hidden)
        for label, token in enumerate(ids):
            for k in range(config.num_heads):
                root = label - 1 - k
                if root < 1 or token not in columns or not mask[root : label + 1].all():
                    continue
                log_probs = run_head(head, states[root - 1], ids[root:label]).log_softmax(-1)
                teacher = (head.lm_head.weight[columns] @ hidden[label - 1]).detach().softmax(-1)
                divergence = (teacher * (teacher.log() - log_probs)).sum()
                term = ce * -log_probs[columns.index(token)] + kl * divergence
                loss = loss + config.depth_decay**k * term
                for name, value in (("loss", term.item()), ("top1", columns[int(log_probs.argmax())] == token)):
                    metrics[f"depth{k + 1}/{name}"][0] += value
                    metrics[f"depth{k + 1}/{name}"][1] += 1
    return loss, metrics


@pytest.mark.parametrize("vocabulary", [None, VOCABULARY], ids=["all-tokens", "draft-vocabulary"])
@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
@pytest.mark.parametrize("chunk_size", [2, 256])
def test_loss_gradient_and_metrics_equal_the_definition(tiny_target, vocabulary, prefix, chunk_size):
    options = {"num_heads": 3, "num_layers": 2, "prefix_layer": prefix, "chunk_size": chunk_size, "depth_decay": 0.7}
    head = make_head(tiny_target, vocabulary=vocabulary, losses={"ce": 0.4, "kl": 0.6}, **options)
    batch = make_batch(vocabulary=vocabulary)
    output = head(batch)
    expected, metrics = slow_loss(head, batch, 0.4, 0.6)
    assert float(expected.detach()) > 1
    torch.testing.assert_close(output.loss, expected, atol=1e-6, rtol=1e-6)
    for name, (total, count) in metrics.items():
        assert output.metrics[name].tolist() == pytest.approx([total, count])
    parameters = dict(head.named_parameters())
    found = torch.autograd.grad(output.loss, list(parameters.values()))
    wanted = torch.autograd.grad(expected, list(parameters.values()))
    # powers of depth_decay are float32: 1e-8; so are Hugging Face's rotary angles
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if prefix else {"atol": 1e-7, "rtol": 1e-6}
    for name, a, b in zip(parameters, found, wanted, strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
def test_an_untrained_head_repeats_the_targets_own_guess(tiny_target, prefix):
    head = make_head(tiny_target, random=0.0, num_heads=3, num_layers=2, prefix_layer=prefix)
    hidden = torch.randn(2, 4, D, dtype=torch.float64)
    drafter = head.drafter()
    logits = [drafter.sync(torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]]), hidden, [4, 2])]
    logits.append(drafter.extend(torch.tensor([[7], [8]]), torch.zeros(2, 1, dtype=torch.int64))[:, 0])
    logits.append(drafter.extend(torch.tensor([[1], [2]]), torch.ones(2, 1, dtype=torch.int64))[:, 0])
    expected = tiny_target.lm_head(torch.stack([hidden[0, 3], hidden[1, 1]]))
    for level in logits:
        torch.testing.assert_close(level, expected)


@pytest.mark.parametrize("prefix", [False, True], ids=["plain", "prefix"])
def test_every_node_is_drafted_from_the_root_and_its_own_path(tiny_target, prefix):
    head = make_head(tiny_target, num_heads=3, num_layers=2, prefix_layer=prefix)
    batch = make_batch((7,))
    state = read_text(head, batch.hidden[0, :5])[-1]
    root = int(batch.token_ids[0, 5])
    drafter = head.drafter()
    torch.testing.assert_close(
        drafter.sync(batch.token_ids[:, :6], batch.hidden[:, :5], [5])[0], run_head(head, state, [root])
    )
    level = drafter.extend(torch.tensor([[11, 12, 13]]), torch.zeros(1, 3, dtype=torch.int64))
    for logits, token in zip(level[0], (11, 12, 13), strict=True):
        torch.testing.assert_close(logits, run_head(head, state, [root, token]))
    level = drafter.extend(torch.tensor([[21, 22]]), torch.tensor([[3, 1]]))
    for logits, path in zip(level[0], ([13, 21], [11, 22]), strict=True):
        torch.testing.assert_close(logits, run_head(head, state, [root, *path]))


def test_the_first_head_sees_the_root(tiny_target):
    head, hidden = make_head(tiny_target), torch.ones(1, 2, D, dtype=torch.float64)
    a, b, c = (head.drafter().sync(torch.tensor([ids]), hidden, [2]) for ids in ([1, 2, 3], [1, 2, 4], [1, 9, 3]))
    assert not torch.allclose(a, b)
    assert torch.equal(a, c)  # of the tokens before it the state has seen all


def test_embeddings_are_what_the_lent_module_returns(tiny_target):
    """Gemma scales its embeddings in the module, behind the weight."""

    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 3.0

    class Lender:
        name, fingerprint, lm_head = "scaled", "0", tiny_target.lm_head
        embed = Scaled(V, D, _weight=tiny_target.embed.weight.detach().clone()).double()

    class Baked(Lender):
        embed = nn.Embedding(V, D, _weight=tiny_target.embed.weight.detach() * 3.0)

    heads, batch = [make_head(lender) for lender in (Lender, Baked)], make_batch()
    assert heads[0](batch).loss.item() == pytest.approx(heads[1](batch).loss.item())
    assert heads[0](batch).loss.item() != pytest.approx(make_head(tiny_target)(batch).loss.item())
    heads[0](batch).loss.backward()
    assert Lender.embed.weight.grad is None


def test_weights_have_the_shapes_of_the_published_heads(tiny_target):
    """zankner/Hydra: `hydra_mlp.{k}.0.{linear,res_connection}` read k + 2 vectors, further blocks one."""
    shapes = {name: tuple(tensor.shape) for name, tensor in make_head(tiny_target, num_layers=2).state_dict().items()}
    expected = {}
    for k in range(4):
        for part, width in ((f"{k}.0.linear", k + 2), (f"{k}.0.res_connection", k + 2), (f"{k}.1.linear", 1)):
            expected |= {f"blocks.{part}.weight": (D, width * D), f"blocks.{part}.bias": (D,)}
    assert shapes == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"num_layers": 0}, "num_layers must be at least 1"),
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"losses": {"mse": 1.0}}, "mse"),
        ({"losses": {}}, "loss"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size must be between 1 and the target's 320"),
    ],
)
def test_settings_that_make_no_head_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        HydraConfig(**SIZES, **options)


def test_a_target_whose_lm_head_has_a_bias_is_refused(tiny_target):
    class Lender:
        name, fingerprint, embed = "biased", "0", tiny_target.embed
        lm_head = nn.Linear(D, V)

    with pytest.raises(ValueError, match="lm_head has a bias, which hydra heads do not support"):
        create_head("hydra", HydraConfig(**SIZES), Lender())
