"""A small language model that drafts for a target (Leviathan et al. 2023, arXiv:2211.17192).

Any causal LM with the target's tokenizer. Its K/V of drafted tokens are kept where the target accepted them, so a step
feeds it the one or two tokens it has not seen and then each level of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decode.session import FEW_ROWS, Session
from decode.target import Target
from decode.tree import TokenTree, chain_shape
from heads.checkpoint import read_plans
from heads.growing import GrowingTree, level_visible
from heads.transfer import to_device


class DraftModel:
    """A draft model for one target. Stateless but for weights; `drafter` opens the state of a session."""

    tree = ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0))
    """By default, a chain of four tokens."""

    def __init__(self, model: Target, target: Target, *, tuned: Mapping[str, Any] | None = None) -> None:
        """Pair a draft model with its target.

        Args:
            model: The draft model, on the target's device.
            target: The target it drafts for.
            tuned: Plans of `decode.tune` for it, by device and precision.

        Raises:
            ValueError: If their vocabularies or devices differ. A vocabulary that is only padded to another size is
                fine.
        """
        self.model = model
        self.target = target
        self.tuned = tuned or {}
        self.num_drafted = _shared_tokens(model, target)
        if model.device != target.device:
            raise ValueError(
                f"the draft model is on {model.device}, but the target on {target.device}; put both on one device"
            )

    @property
    def feature_layers(self) -> Sequence[int]:
        """None: a draft model reads the text only."""
        return ()

    @classmethod
    def from_pretrained(cls, name: str | Path, target: Target, *, dtype: str | torch.dtype | None = None) -> DraftModel:
        """Load a draft model for `target` from a folder or the hub, to the target's device.

        Args:
            name: Folder or hub name.
            target: The target.
            dtype: Precision of the weights, the target's by default. Drafts need not be precise.

        Raises:
            ValueError: See `DraftModel`.
            OSError: If there is no such model.
            UnsupportedTargetError: If it cannot score trees.
        """
        precision = target.dtype if dtype is None else dtype
        model = Target.from_pretrained(str(name), dtype=precision, device=target.device)
        return cls(model, target, tuned=read_plans(name))

    def drafter(self) -> DraftModelDrafter:
        """Return a fresh drafting state."""
        return DraftModelDrafter(self)


class DraftModelDrafter:
    """The draft model's session; after `sync` its cache holds every committed token, the root included."""

    def __init__(self, draft: DraftModel) -> None:
        self._draft = draft
        self._model = draft.model
        self._session: Session | None = None
        self._vocabulary: Tensor | None = None
        if draft.num_drafted < draft.target.vocab_size:
            self._vocabulary = torch.arange(draft.num_drafted, device=self._model.device)
        self._start_tree(0)

    @property
    def max_depth(self) -> int:
        """The draft model's context."""
        return self._model.max_length

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return self._draft.target.vocab_size

    @property
    def vocabulary(self) -> Tensor | None:
        """[U] target ids of the logit columns, or None."""
        return self._vocabulary

    def _start_tree(self, rows: int) -> None:
        device = self._model.device
        self._tokens = torch.empty(rows, 0, dtype=torch.int64, device=device)  # [B, M] nodes below the root
        self._parents = torch.empty(rows, 0, dtype=torch.int64, device=device)  # [B, M] 0 is the root
        self._tree = GrowingTree(rows, device)

    def sync(self, token_ids: Tensor, hidden: Tensor, lengths: Sequence[int], features: Tensor | None = None) -> Tensor:
        """Absorb newly committed tokens, the root included; see `heads.Drafter.sync`. States are not used."""
        known = self._known(token_ids)
        if self._session is None:
            texts = [ids[: length + 1] for ids, length in zip(known.tolist(), lengths, strict=True)]
            self._session = self._model.session(len(texts), 2 * max(map(len, texts)))
            logits = self._session.prefill(texts).logits[:, 0]
        else:
            logits = self._advance(self._session, known, lengths)
        self._start_tree(len(lengths))
        return logits[:, : self._draft.num_drafted]

    def _known(self, token_ids: Tensor) -> Tensor:
        """Clamp ids of a target's padding, which mean nothing, to those the draft model has."""
        return token_ids.clamp(max=self._model.vocab_size - 1)

    def _advance(self, session: Session, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Commit the new tokens, of which drafted nodes may hold a beginning, and return the logits after them: [B, V].

        Args:
            session: The draft model's.
            token_ids: [B, L + 1]; the first of each row, its old root, is in the cache.
            lengths: How many more each row has.
        """
        fetched = torch.cat([token_ids, self._tokens, self._parents], dim=1).tolist()  # at once: asking is slow
        size, count = token_ids.shape[1], self._tokens.shape[1]
        texts = [row[1 : length + 1] for row, length in zip(fetched, lengths, strict=True)]
        nodes = [(row[size : size + count], row[size + count :]) for row in fetched]
        paths = [_held(tokens, parents, text[:-1]) for (tokens, parents), text in zip(nodes, texts, strict=True)]
        session.commit(paths)
        rest = [text[len(path) :] for text, path in zip(texts, paths, strict=True)]
        session.cache.reserve_for(max(FEW_ROWS, *map(len, rest)))
        device = self._model.device
        chains = [TokenTree(to_device(ids, device), chain_shape(len(ids))) for ids in rest]
        logits = session.score(chains).logits
        session.commit([range(len(ids)) for ids in rest])
        return logits[torch.arange(len(rest), device=device), to_device([len(ids) - 1 for ids in rest], device)]

    @torch.inference_mode()
    def extend(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """Run the model over one level of nodes; see `heads.Drafter.extend`."""
        assert self._session is not None
        cache = self._session.cache
        width = token_ids.shape[1]
        level = self._tree.add(parents)  # [B, W, M]
        self._tokens = torch.cat([self._tokens, self._known(token_ids)], dim=1)
        self._parents = torch.cat([self._parents, parents], dim=1)
        cache.reserve_for(width)
        # behind the context's end lie only nodes that are too deep to be used
        before = to_device(cache.lengths, token_ids.device)[:, None] - 1
        positions = (before + self._tree.depths).clamp(max=self._model.max_length - 1)
        visible = level_visible(level, cache.lengths)
        logits = self._model.forward(self._tokens[:, -width:], positions, visible, cache, None).logits
        return logits[..., : self._draft.num_drafted]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows."""
        assert self._session is not None
        self._session.keep(rows)
        index = list(rows)
        self._tokens, self._parents = self._tokens[index], self._parents[index]
        self._tree.keep(rows)


def _held(tokens: Sequence[int], parents: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return the nodes that spell the longest beginning of `text`; parents count from 1, 0 is the root."""
    path: list[int] = []
    above = 0
    for token in text:
        found = next((n for n, (t, p) in enumerate(zip(tokens, parents, strict=True)) if t == token and p == above), -1)
        if found < 0:
            break
        path.append(found)
        above = found + 1
    return path


def _shared_tokens(model: Target, target: Target) -> int:
    """Return how many tokens, from 0 on, both have.

    Raises:
        ValueError: If an id does not mean the same token in both.
    """
    if model.tokenizer is None or target.tokenizer is None:
        if model.vocab_size != target.vocab_size:
            raise ValueError(
                f"the draft model has {model.vocab_size} tokens and the target {target.vocab_size}; give both their "
                "tokenizers, Target(model, tokenizer), to show that they are the same tokens"
            )
        return target.vocab_size
    ours, theirs = target.tokenizer.get_vocab(), model.tokenizer.get_vocab()
    different = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: ours.get(token, theirs.get(token, 0)),
    )
    if different:
        token = different[0]
        raise ValueError(
            f"the draft model's tokenizer is not the target's: {len(different)} tokens differ, such as {token!r}, "
            f"which is {ours.get(token, 'unknown')} to the target and {theirs.get(token, 'unknown')} to the draft "
            "model; use a draft model that was trained with the target's tokenizer"
        )
    return min(model.vocab_size, target.vocab_size)
