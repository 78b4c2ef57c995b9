"""The target: an unmodified Hugging Face causal LM, and sessions that score token trees on it.

The only file that knows transformers' cache and mask rules. A tree pass gives the model its nodes as one sequence,
positions by depth, and an additive 4-D mask in which a node sees the committed tokens and its ancestors. The K/V go to
our `TreeCache`. Models that cannot roll back (recurrent state) or that need other masks are refused, by name or by a
probe at construction that compares a tree pass with plain forwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerBase

from decode.capture import check_layers, decoder_layers, hidden_states, outputs, side_by_side
from decode.compiled import faster_layers
from decode.fused import give_up_weights
from decode.identity import describe_precision, find_fingerprint
from decode.loading import find_device, find_dtype, load_model
from decode.masks import additive_mask, slot_positions
from decode.quantized import quantization
from decode.session import Session, TargetOutput
from decode.sharded import is_sharded, one_mode, ordinary
from decode.support import layer_kinds, probe, refuse_unsupported
from heads.cache import TreeCache


class Target:
    """A causal LM and its tokenizer. Stateless but for weights: any number of sessions may share it, in one thread.

    `plain_logits` says whether the logits are the lm_head's output as it is; some models scale or cap it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        name: str | None = None,
        pack: bool = True,
        keep_weights: bool = True,
        compile: bool = False,
    ) -> None:
        """Wrap a loaded model.

        Args:
            model: A causal LM with attention "sdpa" or "eager". It is put into eval mode; nothing else of it changes.
            tokenizer: Needed for text prompts, stop strings and text results.
            name: How to call it in head folders; the model's own name by default.
            pack: On a CPU, compute with packed float32 weights and fused layers (see `decode.fused`): the same but for
                rounding, and faster. Modules inside fused layers, and hooks on them, are not called. Models that are
                quantized or spread are left as they are.
            keep_weights: Keep the plain weights beside the packed ones. Without them the model takes half the memory,
                and is for inference only.
            compile: Compile the decoder layers instead of packing (see `decode.compiled`); for GPUs.

        Raises:
            UnsupportedTargetError: If the model cannot score trees exactly.
        """
        self.model = model.eval()  # type: ignore[no-untyped-call]
        self.tokenizer = tokenizer
        self.name = str(name or model.config.name_or_path)
        self._config = model.config.get_text_config()
        self._layer_kinds = layer_kinds(self._config)
        refuse_unsupported(model)
        self.quantize = quantization(model)
        """How the weights are rounded: "8bit", "4bit", another library's method, or None."""
        self.sharded = is_sharded(model)
        """Whether its layers are spread over processes, which must then make the same passes; see `decode.sharded`."""
        names = inspect.signature(type(model).forward).parameters
        self._cache_keyword = "cache" if "cache" in names else "past_key_values"  # transformers < 5.24
        self.packed = faster_layers(model, pack=pack, compile=compile)
        self.plain_logits = probe(self)
        if not (compile or keep_weights) and self.packed:
            self.fingerprint  # noqa: B018 - read from the weights, and cached
            give_up_weights(model, self.packed, keep=self.lm_head)

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        attn: str = "sdpa",
        pack: bool = True,
        keep_weights: bool = False,
        compile: bool = False,
        quantize: str | None = None,
        device_map: str | Mapping[str, int | str] | None = None,
        shard: bool = False,
    ) -> Target:
        """Load a model and its tokenizer from a folder or the hub.

        Args:
            name: Folder or hub name.
            dtype: Weights' precision; "auto" is the checkpoint's own.
            device: Where to put it; a GPU if there is one, else the CPU.
            attn: "sdpa" or "eager".
            pack: See `Target`.
            keep_weights: See `Target`.
            compile: See `Target`.
            quantize: Round the weights to "8bit" or "4bit" while they are loaded; see `decode.quantized`.
            device_map: In place of `device`: "auto", "balanced" or "sequential" spread the layers over the GPUs, a
                mapping says where modules go; see `decode.placed`.
            shard: Spread the layers over the processes of torch.distributed, which all call this; see `decode.sharded`.

        Raises:
            ValueError: If there is no such precision, device, rounding or map.
            OSError: If there is no such model.
            UnsupportedTargetError: See `Target`.
        """
        if device is not None and device_map is not None:
            raise ValueError(f"give device ({device}) or device_map ({device_map}), not both")
        place, known = find_device(device), find_dtype(dtype)
        model, tokenizer = load_model(name, known, place, attn, quantize=quantize, device_map=device_map, shard=shard)
        return cls(model, tokenizer, name=name, pack=pack, keep_weights=keep_weights, compile=compile)

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
        """Where inputs go, and states and logits come back."""
        return self.lm_head.get_parameter("weight").device

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the states, and of weights that are not rounded."""
        return self.model.dtype

    @property
    def precision(self) -> str:
        """The same for people, and how the weights are rounded, if they are."""
        return describe_precision(self.model)

    @property
    def vocab_size(self) -> int:
        """V."""
        return int(self.lm_head.get_parameter("weight").shape[0])

    @property
    def hidden_size(self) -> int:
        """D."""
        return int(self.lm_head.get_parameter("weight").shape[1])

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self._config.num_hidden_layers)

    @cached_property
    def _decoder_layers(self) -> nn.ModuleList:
        return decoder_layers(self.model)

    def _layers(self, numbers: Sequence[int]) -> list[nn.Module]:
        """Return decoder layers by their numbers, from 1 on; where none are wanted, none are looked for."""
        return [self._decoder_layers[number - 1] for number in numbers]

    @property
    def max_length(self) -> int:
        """Longest text, prompt included, that the model was made for."""
        return int(self._config.max_position_embeddings)

    @property
    def window(self) -> int | None:
        """How many tokens back sliding layers see, or None if all layers see everything."""
        slides = self._layer_kinds is None or "sliding_attention" in self._layer_kinds
        window: int | None = self._config.to_dict().get("sliding_window") if slides else None
        return window

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a text: the generation config's (one or several) and the tokenizer's."""
        sources = (self.model.generation_config, self.tokenizer)
        found = [source.eos_token_id for source in sources if source is not None and source.eos_token_id is not None]
        return frozenset(token for eos in found for token in ([eos] if isinstance(eos, int) else eos))

    @cached_property
    def fingerprint(self) -> str:
        """Short hash of sizes and a sample of every weight; see `decode.identity`."""
        return find_fingerprint(self.model)

    def session(self, rows: int, capacity: int, feature_layers: Sequence[int] = ()) -> Session:
        """Open a session of `rows` sequences of at most `capacity` tokens each, their largest trees included.

        Args:
            rows: B.
            capacity: Tokens of the longest row.
            feature_layers: Decoder layers whose outputs are recorded; see `heads.Head.feature_layers`.

        Raises:
            ValueError: If there is no such layer.
        """
        self.check_layers(feature_layers)
        return Session(self, rows, capacity, feature_layers)

    def encode(self, token_ids: Tensor, lengths: Sequence[int]) -> Tensor:
        """Return the states at every token, [B, T, D]; see `encode_features`."""
        return self.encode_features(token_ids, lengths, ())[0]

    @torch.no_grad()  # what it returns is of no inference mode: autograd saves it for the heads' backward pass
    def encode_features(
        self, token_ids: Tensor, lengths: Sequence[int], feature_layers: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return states and features at every token, for training: one causal pass without a cache.

        Args:
            token_ids: [B, T], padded on the right; padding cannot reach the tokens before it.
            lengths: Tokens in each row.
            feature_layers: Decoder layers whose outputs are wanted; see `heads.Head.feature_layers`.

        Returns:
            States [B, T, D] and features [B, T, F], None for no layers.

        Raises:
            ValueError: If there is no such layer.
        """
        self.check_layers(feature_layers)
        last, layers = [length - 1 for length in lengths], self._layers(feature_layers)
        with one_mode(self.model), hidden_states(self.lm_head, last) as hidden, outputs(layers) as found:
            self.model(input_ids=token_ids.to(self.device), use_cache=False)
        return ordinary(hidden[0].to(self.device)), ordinary(side_by_side(found, self.device))

    def check_layers(self, feature_layers: Sequence[int]) -> None:
        """Refuse numbers of decoder layers that there are not.

        Raises:
            ValueError: If they are not ascending or not between 1 and the number of layers.
        """
        check_layers(feature_layers, self.num_layers, self.name)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        visible: Tensor,
        cache: TreeCache,
        last: list[int] | None,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Run the model over new nodes of each row's tree.

        Args:
            token_ids: [B, N] the new nodes.
            positions: [B, M] positions of all nodes of the tree, M >= N; the last N are the new ones.
            visible: [B, N, slots] what each new node may attend to; see `decode.masks`.
            cache: Where their K/V go, behind those of the tree's earlier nodes.
            last: If given, logits are computed for row b's new node `last[b]` only.
            feature_layers: Decoder layers whose outputs are recorded.
        """
        new = positions[:, -token_ids.shape[1] :]
        mask: Any = self._mask(visible, new, positions, cache.lengths)
        cache.begin(token_ids.shape[1], self.device)
        options = {self._cache_keyword: _TransformersCache(cache), "use_cache": True}
        with hidden_states(self.lm_head, last) as hidden, outputs(self._layers(feature_layers)) as layers:
            out = self.model(input_ids=token_ids, attention_mask=mask, position_ids=new, **options)
        logits, states = out.logits.to(self.device), hidden[0].to(self.device)
        return TargetOutput(logits, states, side_by_side(layers, self.device))

    def _mask(self, visible: Tensor, new: Tensor, positions: Tensor, lengths: Sequence[int]) -> Any:
        """Return the additive mask, or one for each kind of layer where a model mixes kinds."""
        full = additive_mask(visible, self.dtype)
        if self.window is None:
            return full
        slots = slot_positions(lengths, positions, visible.shape[-1])
        near = new[:, :, None] - slots[:, None, :] < self.window
        sliding = additive_mask(visible & near, self.dtype)
        return sliding if self._layer_kinds is None else {"full_attention": full, "sliding_attention": sliding}


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
