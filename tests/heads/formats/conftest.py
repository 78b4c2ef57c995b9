"""A tiny target on disk, small heads of all kinds on it, and what tests do with their folders."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import heads
from decode import Target
from heads import Head, create_head, head_class, load_head, save_head
from train.new_head import target_sizes

MODEL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 9,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
SIZES = {
    *("hidden_size", "vocab_size", "draft_vocab_size", "intermediate_size", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "rms_norm_eps", "rope_theta", "num_heads", "num_layers", "own_lm_head"),
    *("feature_layers", "norm_before_residual", "fc_bias"),
}
"""Of heads' configs, what formats have; the rest is of training and of `decode`."""


@dataclass(frozen=True)
class Lab:
    """A folder for tests, and a target."""

    folder: Path
    model: Path
    target: Target
    vocabulary = torch.tensor([1, 2, *range(20, 90, 7), 96])

    def save_model(self, name: str = "other", *, seed: int = 5, dtype: torch.dtype = torch.float32, **options: Any):
        return save_model(self.folder / name, seed=seed, dtype=dtype, **options)

    def head(self, kind: str, *, small: bool = False, seed: int = 1, dtype=torch.float32, **options: Any) -> Path:
        """The folder of a head of random weights; `small` gives it a draft vocabulary."""
        if kind == "eagle3":
            options.setdefault("feature_layers", (2, 4, 6))
        config = head_class(kind).Config
        size = len(self.vocabulary) if small else None
        fields = {"draft_vocab_size": size, **options, **target_sizes(self.target, config)}
        head = create_head(kind, config(**fields), self.target)
        if small:
            head.set_vocabulary(self.vocabulary)
        torch.manual_seed(seed)
        for parameter in head.parameters():
            parameter.data += torch.randn_like(parameter) * 0.1
        folder = self.folder / f"{kind}-{seed}"
        save_head(head.to(dtype), folder, target=self.target)
        return folder

    def export(self, head: Path, to: str, **options: Any) -> Path:
        out = self.folder / f"{head.name}-{to}"
        heads.export(head, out, to=to, **{"target": self.model, **options})
        return out

    def adopt(self, src: Path, **options: Any) -> Path:
        out = self.folder / f"{src.name}-adopted"
        heads.adopt(src, out, **{"target": self.model, **options})
        return out

    def read(self, folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The config and the tensors of an export."""
        (weights,) = folder.glob("*.safetensors")
        return json.loads((folder / "config.json").read_text()), load_file(weights)

    def edit(self, folder: Path, **fields: Any) -> Path:
        """Change fields of a config; None deletes one."""
        path = folder / "config.json"
        config = json.loads(path.read_text()) | fields
        gone = {name for name, value in fields.items() if value is None}
        path.write_text(json.dumps({name: value for name, value in config.items() if name not in gone}))
        return folder

    def replace(self, folder: Path, **tensors: torch.Tensor | None) -> Path:
        """Change tensors (`__` for a dot); None deletes one."""
        (weights,) = folder.glob("*.safetensors")
        found = load_file(weights) | {name.replace("__", "."): tensor for name, tensor in tensors.items()}
        save_file({name: tensor for name, tensor in found.items() if tensor is not None}, weights)
        return folder

    def pickle(self, folder: Path, name: str) -> Path:
        """Turn the weights of an export into a pickle."""
        (weights,) = folder.glob("*.safetensors")
        torch.save(load_file(weights), folder / name)
        weights.unlink()
        return folder

    def sizes(self, head: Head) -> dict[str, Any]:
        return {name: value for name, value in vars(head.config).items() if name in SIZES}

    def assert_same(self, first: Path, second: Path) -> None:
        """Sizes, weights and precisions of two head folders are equal, bit for bit."""
        loaded = [load_head(folder, self.target) for folder in (first, second)]
        assert self.sizes(loaded[0]) == self.sizes(loaded[1])
        stored = [load_file(folder / "model.safetensors") for folder in (first, second)]
        assert stored[0].keys() == stored[1].keys()
        for name, tensor in stored[0].items():
            assert tensor.dtype == stored[1][name].dtype, name
            assert torch.equal(tensor, stored[1][name]), name


def save_model(folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(seed)
    shard = {"max_shard_size": options.pop("max_shard_size")} if "max_shard_size" in options else {}
    model = LlamaForCausalLM(LlamaConfig(**{**MODEL, **options}, initializer_range=0.3))
    model.to(dtype).save_pretrained(folder, **shard)
    return folder


@pytest.fixture(scope="session")
def saved_target(tmp_path_factory) -> tuple[Path, Target]:
    folder = save_model(tmp_path_factory.mktemp("models") / "target")
    return folder, Target(LlamaForCausalLM.from_pretrained(folder), name=str(folder))


@pytest.fixture
def lab(saved_target, tmp_path) -> Lab:
    """A folder for one test."""
    return Lab(tmp_path, *saved_target)


@pytest.fixture
def eagle3(lab):
    """A head with a draft vocabulary, and its export."""
    head = lab.head("eagle3", small=True)
    return head, lab.export(head, "eagle3")
