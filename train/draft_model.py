"""Distil a small draft model: a Llama with the target's tokenizer, taught by the target's own distribution.

The run lives in <run.dir>/<run.name>/ as with every trainer (see train/medusa.py); best/ and last/ are plain Hugging
Face folders that `python -m decode --draft-model` and other engines load. Example:

    accelerate launch train/draft_model.py --config configs/draft_model/smollm2-135m.yaml --optim.lr=5e-4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from data.conversations import Encoded
from decode import DraftModel, Target
from decode.draft_model import DraftModelDrafter
from heads.base import FeatureBatch, Head, HeadConfig, HeadOutput
from heads.checkpoint import HeadNotes
from heads.losses import check_losses, needs_teacher, vocabulary_loss
from train.config import RunConfig, require
from train.model_folder import save_model
from train.run import run_command
from train.teacher import check_teacher


@dataclass(frozen=True, kw_only=True)
class DraftModelConfig(HeadConfig):
    """Sizes and losses of a draft model. `hidden_size` is the target's, `width` the draft model's own."""

    width: int = 256
    """Hidden size of the draft model; its embedding, which is its output projection too, is most of its weights."""
    num_layers: int = 4
    """Decoder layers."""
    num_attention_heads: int = 4
    """Attention heads; their size is width / num_attention_heads."""
    intermediate_size: int = 768
    """Width of the feed-forward layers."""
    embedding: Literal["principal", "random"] = "principal"
    """Start the embedding from the principal directions of the target's, or at random."""
    losses: Mapping[str, float] = field(default_factory=lambda: {"ce": 0.1, "kl": 0.9})
    """Weights of the losses; see `heads.objectives`."""
    chunk_size: int = 128
    """Label positions whose [V] logits are in memory at one time."""

    def __post_init__(self) -> None:
        """Reject sizes and losses that make no model."""
        for name in ("width", "num_layers", "num_attention_heads", "intermediate_size", "chunk_size"):
            value = vars(self)[name]
            require(isinstance(value, int) and value >= 1, f"head.{name} must be at least 1, got {value!r}")
        size, rest = divmod(self.width, self.num_attention_heads)
        require(
            rest == 0 and size % 2 == 0,
            f"head.width ({self.width}) must be head.num_attention_heads ({self.num_attention_heads}) times an even "
            "number, for rotary positions",
        )
        require(
            self.embedding == "random" or self.width <= self.hidden_size,
            f"head.width ({self.width}) is above the target's {self.hidden_size}, which has no more directions; set "
            "--head.embedding=random or a smaller width",
        )
        check_losses(self.losses)


class DraftModelInTraining(Head):
    """A draft model behind the interface that the training loop knows; it is saved as a plain model folder."""

    Config = DraftModelConfig
    kind = "draft model"
    config: DraftModelConfig

    def __init__(self, config: DraftModelConfig, target: Target) -> None:
        super().__init__(config, target)
        bias = dict(self.lm_head.named_parameters(recurse=False)).get("bias")
        check_teacher(target, needs_teacher(config.losses), bias=bias is not None)
        model = _untrained(config, target)
        model.to(target.device)  # type: ignore[arg-type]
        # not packed: packed copies would not follow the training
        self._draft = DraftModel(Target(model, target.tokenizer, name="draft model", pack=False), target)
        self.body = model.model  # without the lm_head, whose weight is the embedding's
        self.train()

    @property
    def model(self) -> PreTrainedModel:
        """The whole model."""
        return self._draft.model.model

    @property
    def borrowed(self) -> Sequence[object]:
        """The target with all its weights."""
        return (*super().borrowed, self._draft.target)

    @property
    def drafting_model(self) -> nn.Module:
        """The whole model, with its lm_head."""
        return self.model

    def forward(self, batch: FeatureBatch) -> HeadOutput:
        """Return the loss summed over supervised tokens: each is predicted from the tokens before it."""
        mask = batch.loss_mask.clone()
        mask[:, 0] = False  # nothing stands before it
        rows, positions = mask.nonzero(as_tuple=True)
        hidden = self.body(input_ids=batch.token_ids, use_cache=False).last_hidden_state  # [B, T, width]
        weight = self.lm_head.get_parameter("weight").detach().to(batch.hidden.dtype)
        loss, terms, correct, _ = vocabulary_loss(
            hidden[rows, positions - 1][:, None],
            self.body.embed_tokens.weight,
            batch.token_ids[rows, positions],
            batch.hidden[rows, positions - 1],
            weight,
            hidden.new_ones(len(rows), 1),
            losses=self.config.losses,
            chunk_size=self.config.chunk_size,
        )
        count = terms.new_tensor(len(rows))
        return HeadOutput(loss=loss, metrics={"top1": torch.stack([correct.sum().to(terms.dtype), count])})

    def drafter(self) -> DraftModelDrafter:
        """Return a fresh drafting state."""
        return self._draft.drafter()


def _untrained(config: DraftModelConfig, target: Target) -> LlamaForCausalLM:
    own, theirs = target.model.config.get_text_config(), target.model.generation_config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.width,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_attention_heads,
            max_position_embeddings=target.max_length,
            tie_word_embeddings=True,
            bos_token_id=own.to_dict().get("bos_token_id"),
            eos_token_id=own.to_dict().get("eos_token_id") if theirs is None else theirs.eos_token_id,
            pad_token_id=own.to_dict().get("pad_token_id"),
        )
    )
    if config.embedding == "principal":
        with torch.no_grad():
            embedding = target.embed.get_parameter("weight").float().cpu()[: config.vocab_size]
            model.get_input_embeddings().weight.copy_(principal(embedding, config.width))  # type: ignore[operator]
    return model


def principal(rows: Tensor, width: int) -> Tensor:
    """Project rows on their `width` principal directions, uncentred, so that products between rows are kept best.

    Args:
        rows: [V, D].
        width: At most D.

    Returns:
        [V, width].
    """
    directions = torch.linalg.eigh(rows.T @ rows).eigenvectors  # ascending
    return rows @ directions[:, -width:].flip(-1)


def build_draft_model(
    config: RunConfig, target: Target, samples: Sequence[Encoded], say: Callable[[str], None]
) -> DraftModelInTraining:
    """Return an untrained draft model."""
    require(config.run.init is None, f"run.init={config.run.init}: only heads start from others; leave it out")
    draft_config = DraftModelConfig(**config.head, hidden_size=target.hidden_size, vocab_size=target.vocab_size)
    return DraftModelInTraining(draft_config, target)


def save_draft_model(head: Head, path: Path, *, target: Target, notes: HeadNotes) -> None:
    """Write the draft model to the folder `path` as a plain Hugging Face model with its tokenizer."""
    assert isinstance(head, DraftModelInTraining)
    save_model(head.model, target, path, {"config": asdict(head.config), **asdict(notes)})


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    run_command({"draft_model": DraftModelConfig}, build_draft_model, __doc__ or "", argv, save_draft_model)


if __name__ == "__main__":
    main()
