"""The recipes of configs/ on tiny models of their targets' families: trained, saved, loaded and decoded with."""

import json
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from decode import Target, generate
from heads import load_head
from train import eagle, medusa

ROOT = Path(__file__).parents[2]
MAINS = {"medusa": medusa.main, "eagle3": eagle.main}
SIZES = {
    **{"vocab_size": 320, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3, "initializer_range": 0.4},
    **{"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
}
SCALED = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""Positions of Llama 3; with an original length of 16 most of a text is behind it."""
LLAMA = {
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    "rope_parameters": SCALED | {"original_max_position_embeddings": 16},
}
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama-3.2-1b": LlamaConfig(**SIZES, **LLAMA, tie_word_embeddings=True),
    "llama-3.1-8b": LlamaConfig(**SIZES, **LLAMA, tie_word_embeddings=False),
    "qwen3-0.6b": Qwen3Config(  # twice as wide in attention as outside
        **SIZES, num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True
    ),
    "mistral-7b-v0.3": MistralConfig(
        **SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=None, tie_word_embeddings=False
    ),
}
TEMPLATES = {"qwen3-0.6b": "qwen3", "llama-3.2-1b": "smollm2", "llama-3.1-8b": "smollm2", "mistral-7b-v0.3": "smollm2"}
"""Those that the special tokens of the tiny tokenizer suit."""


@pytest.fixture(params=FAMILIES)
def recipe(request: pytest.FixtureRequest, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    """Save a tiny bfloat16 target of a family, and two turns of conversation for it; return the recipe's name."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[request.param]).bfloat16().save_pretrained(tmp_path / "target")
    template = ROOT / "tests" / "assets" / "templates" / f"{TEMPLATES[request.param]}.jinja"
    tiny_tokenizer.save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").write_text(template.read_text())
    words = ["the cat", "sat on the mat", "one two", "three four"]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "the mat sat on the cat"}]
    with (tmp_path / "data.jsonl").open("w") as file:
        for word in words:
            messages = [{"role": "user", "content": word}, *turns[1:], *turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    return request.param


def run(kind: str, recipe: str, folder: Path, *arguments: str) -> Path:
    AcceleratorState._reset_state(True)
    given = [f"--target.name={folder / 'target'}", f"--data.source={folder / 'data.jsonl'}", f"--run.dir={folder}"]
    small = ["--optim.epochs=null", "--optim.steps=2", "--optim.batch_size=4", "--optim.accumulation=2"]
    vocabulary = [] if recipe.startswith("mistral") else ["--head.draft_vocab_size=64"]  # whose recipes have none
    layers = ["--head.feature_layers=[1,3]"] if kind == "eagle3" else []
    rest = ["--optim.warmup_steps=0", "--data.max_length=128", "--eval.num_prompts=0", "--run.name=run"]
    config = str(ROOT / "configs" / kind / f"{recipe}.yaml")
    MAINS[kind](["--config", config, *given, *small, *vocabulary, *layers, *rest, *arguments])
    return folder / "run"


@pytest.mark.parametrize("kind", MAINS)
def test_a_head_of_each_family_is_trained_saved_and_loaded_and_changes_no_text(
    kind: str, recipe: str, tmp_path: Path, fresh_accelerate: None
):
    folder = run(kind, recipe, tmp_path)
    losses = [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses[1] < losses[0]
    target = Target.from_pretrained(str(tmp_path / "target"), dtype="float32", device="cpu")
    head = load_head(folder / "last", target)
    if kind == "eagle3":
        attention, shape = head.layer.self_attn, FAMILIES[recipe]
        assert attention.o_proj.in_features == 4 * attention.head_dim == 4 * getattr(shape, "head_dim", 8)
        assert attention.theta == shape.rope_parameters["rope_theta"]
    prompts = [[40, 41, 42, 43], [7, 8, 9, 7, 8], [120]]
    plain = generate(target, prompts, max_new_tokens=32, eos_ids=())
    drafted = generate(target, prompts, head=head, max_new_tokens=32, eos_ids=(), check=True)
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert all(out.stats.offered[0] > 0 for out in drafted)


@pytest.mark.parametrize("recipe", ["qwen3-0.6b"], indirect=True)
def test_the_recipe_learns_from_last_turns_where_the_template_rewrites_others(
    recipe: str, tmp_path: Path, fresh_accelerate: None
):
    with pytest.raises(SystemExit, match=r"turn 2 differently once more turns follow.*--data\.turns=last"):
        run("medusa", recipe, tmp_path, "--data.turns=all")
