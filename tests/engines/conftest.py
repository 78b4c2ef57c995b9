"""A small target with trained heads, and engines that run in an environment of their own (`make test-engines`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engine_drafts
import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import heads
from decode import Target, generate
from heads import FeatureBatch, create_head, head_class, save_head
from train.new_head import target_sizes

LENGTH = 40
MODEL = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # vLLM has kernels of few sizes
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VOCABULARY = torch.arange(0, 320, 2)
STEPS = 150


def save_model(folder: Path, seed: int, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**MODEL, **options}, initializer_range=0.2))
    model.save_pretrained(folder)
    return model


@dataclass(frozen=True)
class Lab:
    """The target, its texts, and a place for heads."""

    folder: Path
    target: Target
    prompts: list[list[int]]
    texts: list[list[int]]

    @property
    def model(self) -> str:
        return self.target.name

    def trained(self, kind: str, name: str, **options: Any) -> Path:
        """The folder of a head that has learnt half of the texts by heart."""
        config = head_class(kind).Config(**options, **target_sizes(self.target, head_class(kind).Config))
        torch.manual_seed(0)
        head = create_head(kind, config, self.target)
        if config.draft_vocab_size is not None:
            head.set_vocabulary(VOCABULARY)
        batch = self._batch(head.feature_layers)
        optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3, weight_decay=0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = head(batch).loss / batch.loss_mask.sum()
            loss.backward()
            optimizer.step()
        folder = self.folder / name
        save_head(head, folder, target=self.target)
        return folder

    def trained_model(self, name: str) -> Path:
        """The folder of a draft model that has learnt half of the texts by heart."""
        model = save_model(self.folder / name, 7, num_hidden_layers=1)
        batch = self._batch(())
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0)
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = model(batch.token_ids).logits[:, :-1]
            F.cross_entropy(logits.flatten(0, 1), batch.token_ids[:, 1:].flatten()).backward()
            optimizer.step()
        model.save_pretrained(self.folder / name)
        return self.folder / name

    def _batch(self, layers: Sequence[int]) -> FeatureBatch:
        half = len(self.prompts) // 2
        rows = [prompt + text for prompt, text in zip(self.prompts[:half], self.texts[:half], strict=True)]
        token_ids = torch.tensor(rows)
        hidden, features = self.target.encode_features(token_ids, [token_ids.shape[1]] * half, layers)
        mask = torch.arange(token_ids.shape[1]) >= len(self.prompts[0])
        features = None if features is None else features.clone()  # inference tensors cannot be trained on
        return FeatureBatch(token_ids, mask.expand(half, -1).clone(), hidden.clone(), features)

    def export(self, head: Path, to: str, **options: Any) -> Path:
        out = head.with_name(f"{head.name}-{to}")
        heads.export(head, out, to=to, target=self.model, **options)
        return out

    def ours(self, folder: Path, tokens: int, **options: Any) -> engine_drafts.Run:
        options |= {"tokens": tokens, "limits": [LENGTH] * len(self.prompts), "eos_ids": ()}
        return engine_drafts.ours(self.target, folder, self.prompts, **options)


@pytest.fixture(scope="session")
def lab(tmp_path_factory) -> Lab:
    folder = tmp_path_factory.mktemp("engines")
    model = save_model(folder / "target", 0)
    target = Target(model, name=str(folder / "target"))
    prompts = torch.randint(2, 320, (12, 6), generator=torch.Generator().manual_seed(3)).tolist()
    results = generate(target, prompts, max_new_tokens=LENGTH, eos_ids=())
    return Lab(folder, target, prompts, [result.token_ids for result in results])
