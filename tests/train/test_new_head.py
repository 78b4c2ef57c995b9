"""An untrained head takes its sizes from any target, and its draft vocabulary from the data."""

from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTNeoXConfig, LlamaConfig, Qwen3Config

from data.conversations import Encoded
from decode import Target
from heads import FeatureBatch, HeadConfig
from heads.base import from_target
from heads.hydra import HydraConfig, HydraHead
from heads.layers import LayerConfig
from heads.medusa import MedusaConfig
from train.command_line import load_config
from train.config import ConfigError
from train.new_head import build_head, target_sizes

COMMON = {"vocab_size": 96, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
MODELS = {
    "llama": (
        LlamaConfig(
            **COMMON, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        ),
        {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "rms_norm_eps": 1e-6, "rope_theta": 5e5},
    ),
    "qwen3": (  # head_dim is not hidden_size / heads
        Qwen3Config(
            **COMMON, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=1, head_dim=12, rms_norm_eps=1e-6,
        ),
        {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 12,
         "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    ),
    "gpt2": (
        GPT2Config(**COMMON, n_embd=32, n_layer=1, n_head=4, n_positions=64, layer_norm_epsilon=1e-4),
        {"intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
         "rms_norm_eps": 1e-4, "rope_theta": 1e4},
    ),
    "gpt-neox": (
        GPTNeoXConfig(
            **COMMON, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
            rope_parameters={"rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.25},
        ),
        {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
         "rms_norm_eps": 1e-5, "rope_theta": 2e4},
    ),
}  # fmt: skip
MINIMAL = ("--target.name=t", "--data.source=d", "--run.name=r", "--optim.steps=1")
HEADS = {"medusa": MedusaConfig, "hydra": HydraConfig}


@pytest.fixture(params=MODELS)
def sized(request: pytest.FixtureRequest) -> tuple[Target, dict[str, float]]:
    config, expected = MODELS[request.param]
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config)), {"hidden_size": 32, "vocab_size": 96, **expected}


def test_sizes_are_the_targets_own_or_what_llama_would_have(sized):
    target, expected = sized
    assert target_sizes(target, LayerConfig) == expected
    assert target_sizes(target, MedusaConfig) == {"hidden_size": 32, "vocab_size": 96}


def test_a_head_of_a_targets_sizes_trains_and_drafts(sized):
    target, _ = sized
    config = load_config(HEADS, [*MINIMAL, "--head.type=hydra", "--head.prefix_layer=true"], "")
    head = build_head(config, target, [], print)
    assert isinstance(head, HydraHead)
    ids = torch.arange(2, 12)[None]
    hidden = target.encode(ids, [10])
    head(FeatureBatch(ids, torch.ones(1, 10, dtype=torch.bool), hidden)).loss.backward()
    assert head.drafter().sync(ids, hidden[:, :9], [9]).shape == (1, 96)


def test_several_kinds_of_layers_rotate_as_full_attention_does(tiny_target, monkeypatch: pytest.MonkeyPatch):
    rope = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    monkeypatch.setattr(tiny_target.model.config, "rope_parameters", rope)
    assert target_sizes(tiny_target, LayerConfig)["rope_theta"] == 1e6


def test_a_field_that_no_target_is_known_to_have_is_refused(tiny_target):
    @dataclass(frozen=True, kw_only=True)
    class Wanting(HeadConfig):
        num_experts: int = from_target()

    with pytest.raises(ConfigError, match=r"Wanting wants \['num_experts'\] from the target; known are .*'head_dim'"):
        target_sizes(tiny_target, Wanting)


@pytest.mark.parametrize("kind", HEADS)
def test_the_draft_vocabulary_is_what_the_data_use(tiny_target, kind, capsys: pytest.CaptureFixture[str]):
    config = load_config(HEADS, [*MINIMAL, f"--head.type={kind}", "--head.draft_vocab_size=3"], "")
    samples = [Encoded([9, 7, 7, 200, 200, 5, 5], [False, *[True] * 6])]
    head = build_head(config, tiny_target, samples, print)
    assert head.kind == kind
    assert head.vocabulary.tolist() == [5, 7, 200]
    assert "draft vocabulary: 3 tokens, which are 100.0% of the supervised ones" in capsys.readouterr().out
