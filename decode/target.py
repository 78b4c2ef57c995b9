"""The target: an unmodified Hugging Face causal LM, and sessions that score token trees on it.

The only file that knows transformers' cache and mask rules. A tree pass gives the model its nodes as one sequence, positions
by depth, and an additive 4-D mask in which a node sees the committed tokens and its ancestors. The K/V go to our `TreeCache`.
Models that cannot roll back (recurrent state) or that need other masks are refused, by name or by a probe at construction
that compares a tree pass with plain forwards.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, PreTrainedModel, PreTrainedTokenizerBase

from decode.masks import additive_mask, prefill_visible, tree_visible
from decode.packing import PackedLinears
from decode.tree import TokenTree, tree_shape
from heads.cache import TreeCache


class UnsupportedTargetError(NotImplementedError):
    """The model cannot be decoded exactly with trees; the message names the part and what is supported."""


@dataclass(frozen=True)
class TargetOutput:
    """What one target pass gives."""

    logits: Tensor
    """[B, N, V] after each node, in the model's precision; after a prefill [B, 1, V], each row's last token."""
    hidden: Tensor
    """[B, N, D] input of the lm_head at each token."""


class Target:
    """A causal LM and its tokenizer. Stateless but for weights: any number of sessions may share it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str | None = None,
        pack: bool = True,
    ) -> None:
        """Wrap a loaded model.

        Args:
            model: A causal LM with attention "sdpa" or "eager". It is put into eval mode; nothing else of it changes.
            tokenizer: Needed for text prompts, stop strings and text results.
            name: How to call it in head folders; the model's own name by default.
            pack: On a CPU, pack the float32 linear layers for inference (see `decode.packing`).

        Raises:
            UnsupportedTargetError: If the model cannot score trees exactly.
        """
        self.model = model.eval()
        self.tokenizer = tokenizer
        self.name: str = name or model.config.name_or_path
        self._config = model.config.get_text_config()
        self._refuse_by_name()
        names = inspect.signature(type(model).forward).parameters
        self._cache_keyword = "cache" if "cache" in names else "past_key_values"  # transformers < 5.24
        self.packed = PackedLinears(model) if pack else None
        self._probe()

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        attn: str = "sdpa",
        pack: bool = True,
    ) -> Target:
        """Load a model and its tokenizer from a folder or the hub.

        Args:
            name: Folder or hub name.
            dtype: Weights' precision; "auto" is the checkpoint's own.
            device: Where to put it; a GPU if there is one, else the CPU.
            attn: "sdpa" or "eager".
            pack: See `Target`.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attn)
        return cls(model.to(device), tokenizer, name=name, pack=pack)

    @property
    def embed(self) -> nn.Module:
        """Token embedding."""
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Module:
        """Output projection."""
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Where inputs go."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the weights."""
        return self.model.dtype

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.lm_head.get_parameter("weight").shape[0])

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.lm_head.get_parameter("weight").shape[1])

    @property
    def max_length(self) -> int:
        """Longest text, prompt included, that the model was made for."""
        return int(self._config.max_position_embeddings)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: the generation config's (one or several) and the tokenizer's."""
        ids: set[int] = set()
        for source in (self.model.generation_config, self.tokenizer):
            eos = None if source is None else source.eos_token_id
            if eos is not None:
                ids.update([eos] if isinstance(eos, int) else eos)
        return frozenset(ids)

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of sizes and a sample of every weight, equal for float32 and bfloat16 copies."""
        digest = hashlib.sha256(f"{self.vocab_size} {self.hidden_size} {self._config.num_hidden_layers}".encode())
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().flatten()
            sample = flat[:: max(1, flat.numel() // 64)].to(torch.bfloat16).cpu()
            digest.update(name.encode() + sample.view(torch.int16).numpy().tobytes())
        return digest.hexdigest()[:16]

    def session(self, rows: int, capacity: int) -> Session:
        """Open a session of `rows` sequences of at most `capacity` tokens each, their largest trees included."""
        return Session(self, rows, capacity)

    @torch.no_grad()  # not inference mode: autograd saves these states for the heads' backward pass
    def encode(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the states at every token, for training: one causal pass without a cache.

        Args:
            token_ids: [B, T], padded on the right; padding cannot reach the tokens before it.
            lengths: Tokens in each row.

        Returns:
            [B, T, D].
        """
        with self._capture_hidden([length - 1 for length in lengths]) as captured:
            self.model(input_ids=token_ids.to(self.device), use_cache=False)
        return captured[0]

    def _forward(
        self, token_ids: Tensor, positions: Tensor, visible: Tensor, cache: TreeCache, last: list[int] | None
    ) -> TargetOutput:
        """Run the model over new nodes behind each row: ids and positions [B, N], visible [B, N, slots]."""
        mask: Any = self._mask(visible, positions, cache)
        cache.begin(token_ids.shape[1], self.device)
        options = {self._cache_keyword: _TransformersCache(cache), "use_cache": True}
        with self._capture_hidden(last) as captured:
            out = self.model(input_ids=token_ids, attention_mask=mask, position_ids=positions, **options)
        return TargetOutput(out.logits, captured[0])

    def _mask(self, visible: Tensor, positions: Tensor, cache: TreeCache) -> Any:
        """Return the additive mask, or one for each kind of layer where a model mixes kinds."""
        full = additive_mask(visible, self.dtype)
        if not self._has_window:
            return full
        slots = _slot_positions(cache.lengths, positions, visible.shape[-1])
        near = positions[:, :, None] - slots[:, None, :] < self._config.sliding_window
        sliding = additive_mask(visible & near, self.dtype)
        return sliding if self._layer_kinds is None else {"full_attention": full, "sliding_attention": sliding}

    @contextmanager
    def _capture_hidden(self, last: list[int] | None) -> Iterator[list[Tensor]]:
        """Record the lm_head's input; with `last`, let it compute only row b's position `last[b]`."""
        captured: list[Tensor] = []

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
            captured.append(args[0])
            if last is None:
                return None
            return (args[0][torch.arange(len(last)), torch.tensor(last)][:, None], *args[1:])

        handle = self.lm_head.register_forward_pre_hook(hook)
        try:
            yield captured
        finally:
            handle.remove()

    @cached_property
    def _layer_kinds(self) -> set[str] | None:
        kinds = self._config.to_dict().get("layer_types")
        return None if kinds is None else set(kinds)

    @property
    def _has_window(self) -> bool:
        if self._layer_kinds is not None:
            return "sliding_attention" in self._layer_kinds
        return self._config.to_dict().get("sliding_window") is not None

    def _refuse_by_name(self) -> None:
        kind = type(self.model).__name__
        if self.model.config.is_encoder_decoder:
            raise UnsupportedTargetError(f"{kind} is an encoder-decoder; Gorgon decodes decoder-only causal LMs")
        if self.model.get_output_embeddings() is None:
            raise UnsupportedTargetError(f"{kind} has no lm_head; load it with AutoModelForCausalLM")
        unknown = (self._layer_kinds or set()) - {"full_attention", "sliding_attention"}
        if unknown or self.model._is_stateful:
            raise UnsupportedTargetError(
                f"{kind} has {', '.join(sorted(unknown)) or 'recurrent'} layers, whose state cannot be rolled back to drop "
                "rejected tokens; supported are full_attention and sliding_attention"
            )
        attention = self._config._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise UnsupportedTargetError(
                f'attention {attention!r} takes no tree mask; load the model with attn_implementation="sdpa" or "eager"'
            )

    @torch.inference_mode()
    def _probe(self) -> None:
        """Compare a tree pass after a prefill with plain forwards, past the window of small sliding-window models."""
        generator = torch.Generator().manual_seed(0)
        window = self._config.sliding_window if self._has_window else 0
        length = max(4, window + 4 if window <= 64 else 4)
        ids = torch.randint(0, min(self.vocab_size, 1000), (length + 5,), generator=generator).tolist()
        prompt, nodes = ids[:length], ids[length:]
        session = self.session(1, length + 5)
        try:
            session.prefill([prompt])
            tree = TokenTree(torch.tensor(nodes, device=self.device), tree_shape((-1, 0, 0, 1, 2)))
            scored = session.score([tree]).logits[0, 3:]
            paths = [(0, 1, 3), (0, 2, 4)]
            plain = []
            for path in paths:
                text = torch.tensor([[*prompt, *(nodes[node] for node in path)]], device=self.device)
                plain.append(self.model(input_ids=text, use_cache=False).logits[0, -1])
        except (TypeError, ValueError, RuntimeError, IndexError) as error:
            raise UnsupportedTargetError(f"{type(self.model).__name__} cannot score a token tree: {error}") from error
        reference = torch.stack(plain).float()
        error = float((scored.float() - reference).abs().max() / reference.abs().max())
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1
        if not error <= tolerance:
            raise UnsupportedTargetError(
                f"{type(self.model).__name__} gives other logits for a token tree than for plain text (relative difference "
                f"{error:.2g}, allowed {tolerance}); its positions or masks are not of a kind that trees can use"
            )


class Session:
    """B sequences being decoded on one target. Not safe to share."""

    def __init__(self, target: Target, rows: int, capacity: int) -> None:
        self._target = target
        self.cache = TreeCache(rows, capacity)

    @property
    def lengths(self) -> list[int]:
        """Committed tokens of each row that have K/V: all but the root."""
        return self.cache.lengths

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], *, chunk_size: int = 512) -> TargetOutput:
        """Commit the prompts and return each row's logits after its last token.

        Args:
            prompts: B prompts of at least one token.
            chunk_size: Tokens in one pass; no [T, T] mask of a long prompt is made.

        Returns:
            Logits [B, 1, V] and states [B, L, D], padded on the right.
        """
        device = self._target.device
        longest = max(map(len, prompts))
        ids = torch.tensor([[*prompt, *[prompt[-1]] * (longest - len(prompt))] for prompt in prompts], device=device)
        hidden: list[Tensor] = []
        logits: list[Tensor | None] = [None] * len(prompts)
        for start in range(0, longest, chunk_size):
            chunk = ids[:, start : start + chunk_size]
            size = chunk.shape[1]
            positions = torch.arange(start, start + size, device=device).expand(len(prompts), -1)
            # rows that have ended run along: their tokens land behind their own length and are never read
            self.cache.lengths = [start] * len(prompts)
            visible = prefill_visible(start, size, device).expand(len(prompts), -1, -1)
            last = [min(max(len(prompt) - 1 - start, 0), size - 1) for prompt in prompts]
            out = self._target._forward(chunk, positions, visible, self.cache, last)
            hidden.append(out.hidden)
            for row, prompt in enumerate(prompts):
                if start < len(prompt) <= start + size:
                    logits[row] = out.logits[row]
        self.cache.lengths = [0] * len(prompts)
        self.cache.commit([range(len(prompt)) for prompt in prompts])
        return TargetOutput(torch.stack([row for row in logits if row is not None]), torch.cat(hidden, dim=1))

    @torch.inference_mode()
    def score(self, trees: Sequence[TokenTree]) -> TargetOutput:
        """Run the target once over all nodes of all rows' trees.

        Args:
            trees: One tree for each row; node 0 is the row's last committed token.

        Returns:
            Logits [B, N, V] and states [B, N, D]; rows with fewer than N nodes are padded.
        """
        device = self._target.device
        size = max(tree.shape.size for tree in trees)
        ids = nn.utils.rnn.pad_sequence([tree.token_ids for tree in trees], batch_first=True)
        positions = torch.tensor(
            [
                [length + depth for depth in tree.shape.depths] + [length] * (size - tree.shape.size)
                for tree, length in zip(trees, self.lengths, strict=True)
            ],
            device=device,
        )
        visible = tree_visible([tree.shape for tree in trees], self.lengths, device)
        return self._target._forward(ids, positions, visible, self.cache, None)

    @torch.inference_mode()
    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the K/V of each row's path, in path order, and forget the rest of the scored trees."""
        self.cache.commit(paths)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; the others have ended."""
        self.cache.keep(rows)


class _TransformersCache(Cache):
    """Shows a `TreeCache` to transformers' attention layers."""

    def __init__(self, cache: TreeCache) -> None:
        super().__init__(layers=[])
        self._cache = cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self._cache.lengths)


def _slot_positions(lengths: Sequence[int], positions: Tensor, slots: int) -> Tensor:
    """Return the position of what each slot holds, [B, slots]: committed tokens in order, then the new nodes."""
    held = torch.arange(slots, device=positions.device).repeat(len(lengths), 1)
    for row, length in enumerate(lengths):
        held[row, length : length + positions.shape[1]] = positions[row]
    return held
