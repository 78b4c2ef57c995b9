"""A tree pass equals plain forwards along each path, for many architectures; commit equals a fresh prefill."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    T5Config,
)

from decode import Target, UnsupportedTargetError
from decode.tree import TokenTree, chain_shape, tree_shape

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
WINDOW = 6
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=8),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=WINDOW),
    "gemma2": Gemma2Config(**SIZES, head_dim=8, sliding_window=WINDOW),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=WINDOW),
    "phi3": Phi3Config(**SIZES),
    "gpt-neox": GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gpt2": GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=1),
}


def make_target(name: str, attention: str, dtype: torch.dtype = torch.float64) -> Target:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=attention).to(dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return Target(model)


def plain_logits(target: Target, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return target.model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]


def path_to(parents: tuple[int, ...], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] != -1:
        path.insert(0, parents[path[0]])
    return path


CASES = [
    (name, attention) for name in CONFIGS for attention in ("sdpa", "eager") if (name, attention) != ("gemma2", "sdpa")
]


@pytest.mark.parametrize(("name", "attention"), CASES)  # transformers has no sdpa for gemma2
def test_tree_logits_equal_plain_forwards_and_commit_equals_prefill(name, attention):
    target = make_target(name, attention)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(2, 97, (n,), generator=generator).tolist() for n in (11, 3, 17)]
    shapes = [(-1, 0, 0, 1, 1, 2, 4), (-1,), (-1, 0, 1, 2)]
    session = target.session(3, 40)
    out = session.prefill(prompts, chunk_size=5)
    tolerance = 1e-9 if attention == "sdpa" else 1e-5  # eager attention takes its softmax in float32
    for row, prompt in enumerate(prompts):
        torch.testing.assert_close(out.logits[row, 0], plain_logits(target, prompt), atol=tolerance, rtol=tolerance)
    texts = [list(prompt) for prompt in prompts]
    for _ in range(3):
        trees = [TokenTree(torch.randint(2, 97, (len(s),), generator=generator), tree_shape(s)) for s in shapes]
        scored = session.score(trees)
        for row, tree in enumerate(trees):
            for node in range(tree.shape.size):
                text = texts[row] + tree.token_ids[path_to(tree.shape.parents, node)].tolist()
                expected = plain_logits(target, text)
                torch.testing.assert_close(scored.logits[row, node], expected, atol=tolerance, rtol=tolerance)
        paths = [(0, 1, 4, 6), (0,), (0, 1)]
        session.commit(paths)
        for row, path in enumerate(paths):
            texts[row] += trees[row].token_ids[list(path)].tolist()
    assert session.lengths == [len(text) for text in texts]
    for row, text in enumerate(texts):
        fresh = target.session(1, 40)
        fresh.prefill([text])
        for kept, expected in zip(session.cache.contents(row), fresh.cache.contents(0), strict=True):
            torch.testing.assert_close(kept, expected, atol=tolerance, rtol=tolerance)


def test_rows_that_end_leave_the_others_untouched():
    target = make_target("llama", "sdpa")
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    session = target.session(3, 20)
    session.prefill(prompts)
    session.keep([2, 0])
    trees = [TokenTree(torch.tensor([20]), chain_shape(1)), TokenTree(torch.tensor([21]), chain_shape(1))]
    logits = session.score(trees).logits[:, 0]
    torch.testing.assert_close(logits[0], plain_logits(target, [10, 11, 12, 13, 20]))
    torch.testing.assert_close(logits[1], plain_logits(target, [5, 6, 7, 21]))


def test_hidden_is_the_lm_heads_input_and_encode_gives_the_same():
    target = make_target("gemma2", "eager")  # its logits are soft-capped after the lm_head
    prompts = [[5, 6, 7, 8, 9], [10, 11]]
    prefill = target.session(2, 8).prefill(prompts).hidden
    encoded = target.encode(torch.tensor([prompts[0], [*prompts[1], 1, 1, 1]]), [5, 2])
    torch.testing.assert_close(prefill[0], encoded[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(prefill[1, :2], encoded[1, :2], atol=1e-5, rtol=1e-5)
    assert not target.plain_logits
    assert make_target("llama", "sdpa").plain_logits
    cap = target.model.config.final_logit_softcapping
    capped = torch.tanh(target.lm_head(encoded[0, -1:]) / cap) * cap
    torch.testing.assert_close(capped[0], plain_logits(target, prompts[0]))


def test_capacity_is_a_clear_error():
    session = make_target("llama", "sdpa").session(1, 4)
    session.prefill([[5, 6, 7, 8]])
    with pytest.raises(RuntimeError, match="4 slots cannot take 1 nodes after 4 tokens"):
        session.score([TokenTree(torch.tensor([9]), chain_shape(1))])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MambaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, state_size=4), "recurrent"),
        (
            FalconH1Config(**SIZES, head_dim=8, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),
            "rolled back",
        ),
        (BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4), "token tree"),
    ],
    ids=["mamba", "falcon-h1", "bloom"],
)
def test_models_that_cannot_roll_back_or_take_positions_are_refused_by_name(config, reason):
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedTargetError, match=reason) as error:
        Target(model)
    assert type(model).__name__ in str(error.value)


def test_encoder_decoders_and_foreign_attention_are_refused():
    t5 = AutoModelForSeq2SeqLM.from_config(
        T5Config(vocab_size=97, d_model=16, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
    )
    with pytest.raises(UnsupportedTargetError, match="encoder-decoder"):
        Target(t5)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UnsupportedTargetError, match="no tree mask"):
        Target(model)


def test_fingerprint_survives_bfloat16_and_sees_other_weights():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    single = Target(model).fingerprint
    assert Target(model.to(torch.bfloat16)).fingerprint == single
    other = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    assert Target(other).fingerprint != single


def test_packed_linears_compute_the_same_and_fall_back_when_weights_change():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"]).eval()
    ids = torch.randint(0, 97, (1, 9))
    with torch.no_grad():
        plain = model(ids).logits
    keys = list(model.state_dict())
    target = Target(model)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-4)
        model.lm_head.weight.mul_(2)
        torch.testing.assert_close(model(ids).logits, 2 * plain, atol=1e-5, rtol=1e-4)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight / 2)
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-5, rtol=1e-4)
        model.lm_head.weight.data.mul_(3)  # unseen by torch's version counter
        target.packed.repack()
        torch.testing.assert_close(model(ids).logits, 3 * plain, atol=1e-5, rtol=1e-4)
    assert list(model.state_dict()) == keys
    model(ids).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    assert target.packed is not None
    target.packed.disable()
    assert all("forward" not in vars(module) for module in model.modules())


def test_a_model_on_several_devices_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedTargetError, match="spread over cpu, meta"):
        Target(model)


@pytest.mark.parametrize(("options", "message"), [({"dtype": "float23"}, "bfloat16"), ({"device": "warp"}, "cuda:N")])
def test_unknown_precisions_and_devices_are_clear_errors(options, message):
    with pytest.raises(ValueError, match=message):
        Target.from_pretrained("unused", **options)


def test_a_folder_that_holds_no_model_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"not a model folder: it has no config\.json"):
        Target.from_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text('{"format": 1, "type": "medusa"}')
    with pytest.raises(ValueError, match="a head goes to --head"):
        Target.from_pretrained(str(tmp_path))
