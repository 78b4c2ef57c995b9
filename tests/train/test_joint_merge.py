"""One model of a target and its adapter: the same text, and heads that are exact on it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from decode import Sampling, StaticTree, Target, generate
from decode.compare import first_difference
from heads import load_head, read_notes
from train.adapter import WEIGHTS
from train.merge import main

PROMPTS = ["the cat", "one two three"]
Launch = Callable[..., Path]


@pytest.fixture
def best(launch: Launch) -> Path:
    """Heads with an adapter that changes the target's texts."""
    options = ("--head.type=medusa2", "--head.rank=4", "--head.head_weight=1", "--optim.lr=0.05", "--head.adapter_lr=1")
    return launch(*options, "--optim.schedule=constant", "--optim.steps=20") / "last"


def adapted_text(folder: Path, target_folder: Path, prompt: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    adapted, ids = PeftModel.from_pretrained(model, str(folder / "adapter")), list(prompt)
    while len(ids) < len(prompt) + count:
        with torch.no_grad():
            ids.append(int(adapted(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_the_merged_target_writes_what_the_adapted_one_writes_and_the_heads_are_exact_on_it(
    best: Path, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "merged"
    assert main([str(best), str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"wrote {out}/target, in float32, and {out}/head" in printed
    assert f"python -m decode {out}/target PROMPT --head {out}/head" in printed
    target = Target.from_pretrained(str(out / "target"), dtype="float32", device="cpu")
    original = Target.from_pretrained(str(target_folder), dtype="float32", device="cpu")
    changed = 0
    for prompt in PROMPTS:
        ids = target.tokenizer(prompt)["input_ids"]
        plain = generate(target, ids, max_new_tokens=20, eos_ids=()).token_ids
        expected = adapted_text(best, target_folder, ids, 20)
        difference = first_difference(target, ids, plain, expected, Sampling())
        assert difference is None or difference.near_tie, difference
        changed += plain != generate(original, ids, max_new_tokens=20, eos_ids=()).token_ids
    assert changed
    load_head(out / "head", target)
    for sampling in (Sampling(), Sampling(temperature=0.9, seed=1)):
        plain = generate(target, PROMPTS, sampling=sampling, max_new_tokens=20, eos_ids=())
        drafted = generate(
            target, PROMPTS, sampling=sampling, max_new_tokens=20, eos_ids=(), head=out / "head",
            grow=StaticTree(((0,), (1,), (0, 0))),
        )  # fmt: skip
        assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
        assert sum(sum(result.stats.accepted) for result in drafted) > 0
    assert read_notes(out / "head") == read_notes(best)
    assert AutoTokenizer.from_pretrained(out / "target").chat_template == target.tokenizer.chat_template
    with pytest.raises(ValueError, match="load the head with its own target"):
        load_head(out / "head", original)


def test_the_precision_is_the_targets_own_or_the_one_asked_for(
    best: Path, target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    exact = PeftModel.from_pretrained(model, str(best / "adapter")).merge_and_unload().state_dict()
    assert main([str(best), str(tmp_path / "rounded"), "--dtype", "bfloat16"]) == 0
    assert "in bfloat16, to which the sums were rounded; --dtype float32 keeps them" in capsys.readouterr().out
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded" / "target")
    for name, part in rounded.state_dict().items():
        assert torch.equal(part, exact[name].to(torch.bfloat16))
    load_head(tmp_path / "rounded" / "head", Target(rounded))


def test_a_wrong_base_or_a_mixed_folder_is_refused_and_nothing_is_written(
    best: Path, target_folder: Path, tmp_path: Path, tiny_tokenizer, capsys: pytest.CaptureFixture[str]
):
    torch.manual_seed(5)
    other = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    torch.nn.init.normal_(other.model.layers[0].mlp.up_proj.weight)
    other.save_pretrained(tmp_path / "other")
    tiny_tokenizer.save_pretrained(tmp_path / "other")
    assert main([str(best), str(tmp_path / "merged"), "--target", str(tmp_path / "other")]) == 2
    assert "was not trained on" in (error := capsys.readouterr().err)
    assert "give the original target with --target" in error
    adapter = best / "adapter" / WEIGHTS
    weights = load_file(adapter)
    next(iter(weights.values()))[0, 0] += 1e-3
    save_file(weights, adapter)
    assert main([str(best), str(tmp_path / "merged")]) == 2
    assert "copy the folder again, whose parts are of two heads" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    assert not list(tmp_path.glob(".merged*"))


def test_folders_that_cannot_be_merged_are_refused(best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "there").mkdir()
    assert main([str(best), str(tmp_path / "there")]) == 2
    assert "there exists; choose another folder" in capsys.readouterr().err
    (best / "adapter" / "adapter_model.safetensors").unlink()
    assert main([str(best), str(tmp_path / "merged")]) == 2
    assert "has no adapter/adapter_model.safetensors; give a head trained with --head.type=medusa2" in (
        capsys.readouterr().err
    )


def test_layers_that_are_stored_transposed_are_merged_too(launch: Launch, tiny_tokenizer, tmp_path: Path):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_embd=16, n_layer=1, n_head=2, n_positions=128, initializer_range=0.4)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer.save_pretrained(tmp_path / "gpt2")
    options = ("--head.type=medusa2", "--head.rank=4", "--optim.lr=0.05", "--head.adapter_lr=1", "--optim.steps=4")
    head = launch(f"--target.name={tmp_path / 'gpt2'}", *options, "--head.modules=[c_attn,c_proj,c_fc]") / "last"
    assert main([str(head), str(tmp_path / "merged")]) == 0
    target = Target.from_pretrained(str(tmp_path / "merged" / "target"), dtype="float32", device="cpu")
    ids = target.tokenizer("the cat")["input_ids"]
    plain = generate(target, ids, max_new_tokens=12, eos_ids=()).token_ids
    difference = first_difference(target, ids, plain, adapted_text(head, tmp_path / "gpt2", ids, 12), Sampling())
    assert difference is None or difference.near_tie, difference
    drafted = generate(target, ids, max_new_tokens=12, eos_ids=(), head=tmp_path / "merged" / "head")
    assert drafted.token_ids == plain


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("adapter_config.json", '"lora_alpha": 16', '"lora_alpha": 99'),  # would be merged otherwise than trained
        ("adapter_config.json", '"r": 4', '"r": 5'),
        ("adapter_config.json", '"q_proj"', '"k_proj"'),
        ("adapter_config.json", '"LORA"', '"NONE"'),
        ("adapter_config.json", "{", ""),
        (WEIGHTS, None, "garbage"),
    ],
)
def test_a_damaged_adapter_is_refused_without_a_traceback(
    best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, old: str | None, new: str
):
    file = best / "adapter" / name
    text = new if old is None else file.read_text().replace(old, new)
    assert old is None or text != file.read_text()
    file.write_text(text)
    assert main([str(best), str(tmp_path / "merged")]) == 2
    assert f"{best}/adapter is damaged: " in (error := capsys.readouterr().err)
    assert "copy the folder again" in error
    assert not (tmp_path / "merged").exists()


def test_a_folder_that_the_run_would_replace_is_refused(best: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(best), str(best / "a" / "merged")]) == 2
    assert "which its run replaces when it goes on; choose another folder" in capsys.readouterr().err


def test_heads_of_a_target_in_half_precision_are_merged_and_all_may_read_them(launch: Launch, tmp_path: Path):
    options = ("--head.type=medusa2", "--head.rank=4", "--optim.steps=1", "--target.dtype=float16")
    head = launch(*options) / "last"
    assert main([str(head), str(tmp_path / "merged")]) == 0
    files = [path for path in (tmp_path / "merged").rglob("*") if path.is_file()]
    assert len({path.stat().st_mode for path in files}) == 1
    load_head(tmp_path / "merged" / "head", Target.from_pretrained(str(tmp_path / "merged" / "target"), device="cpu"))


def test_a_target_that_has_moved_is_asked_for(best: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = best / "adapter" / "adapter_config.json"
    settings = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "gone")}
    file.write_text(json.dumps(settings))
    assert main([str(best), str(tmp_path / "merged")]) == 2
    assert "if it has moved, say where it is with --target" in capsys.readouterr().err
