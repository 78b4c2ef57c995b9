"""A target as its files: what exporting and adopting heads need of it, without loading the model.

Weights are read one at a time, and only embedding and lm_head are kept, so that heads of a target that fits no machine
at hand can be converted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from heads.fingerprint import fingerprint
from heads.formats.folder import WEIGHTS, read_config, section, tensor_names
from heads.hub import find_folder

INDEX = f"{WEIGHTS}.index.json"
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
LM_HEADS = ("lm_head.weight", "embed_out.weight")
RENAMED = {"embed_out.weight": "lm_head.weight"}
"""Names in files that transformers' models call otherwise."""
BARE = (*EMBEDDINGS, "language_model.")
"""Beginnings of names that modules do not have: the model's own is not before them."""
SCALED_EMBEDDINGS = ("gemma", "vaultgemma", "minicpm3", "inkling")
"""Types of models, or how those begin, whose embedding modules scale or normalize what they look up."""
BUFFERS = (".rotary_emb.inv_freq",)
"""Ends of names in old files that are no weights."""


class TargetFiles:
    """The folder of a causal LM as `save_pretrained` writes it; lends heads its embedding and lm_head (`heads.Lender`).

    Its fingerprint needs files that name weights as transformers' modules do, or as `RENAMED` says; others are refused.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the config and the names of the weights.

        Args:
            folder: Folder, or name on the hub, whose files are then downloaded.

        Raises:
            ValueError: If there is no such model, or it has no weights in safetensors.
        """
        self.name = str(folder)
        self.quantize: str | None = None
        self.folder = find_model(folder)
        self.config: Mapping[str, Any] = read_config(self.folder)
        self._files = dict(self._names())
        if not self._files:
            raise ValueError(f"{folder} has no {WEIGHTS} and no {INDEX}; save the target with save_pretrained first")

    def _names(self) -> Iterator[tuple[str, Path]]:
        index, single = self.folder / INDEX, self.folder / WEIGHTS
        files = [single] if single.is_file() else []
        if index.is_file():  # a folder may hold the same weights a second time, in files of another kind
            files = sorted({self.folder / str(file) for file in _weight_map(self.folder).values()})
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file} is missing, which {index.name} names; copy the target again")
            yield from ((name, file) for name in tensor_names(file) if not name.endswith(BUFFERS))

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The config of the language model, of a model that has others beside it too."""
        return section(self.config, "text_config") or self.config

    @property
    def scales_embedding(self) -> bool:
        """Whether the model's embedding gives other numbers than the rows of its weight."""
        kind = str(self.text_config.get("model_type"))
        return kind.startswith(SCALED_EMBEDDINGS) or bool(self.text_config.get("scale_embedding"))

    def number(self, *names: str) -> int:
        """Return a number above 0 of the config, under the first name that it has.

        Raises:
            ValueError: If it has none.
        """
        for name in names:
            found = self.text_config.get(name)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return found
        raise ValueError(f"the config.json of {self.name} must have {' or '.join(names)}, a number above 0")

    @property
    def weight_files(self) -> set[Path]:
        """The files of the weights that are read, with their index if they have one."""
        index = self.folder / INDEX
        return {*self._files.values(), *([index] if index.is_file() else [])}

    @property
    def dtype(self) -> str:
        """The precision of the weights, as the config names it."""
        return str(self.text_config.get("dtype") or self.text_config.get("torch_dtype") or "float32")

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.number("num_hidden_layers", "n_layer")

    @property
    def parameters(self) -> int:
        """How many numbers its weights have."""
        count = 0
        for name, file in self._files.items():
            with safe_open(file, framework="pt") as opened:
                count += math.prod(opened.get_slice(name).get_shape())
        return count

    def tensor(self, name: str) -> Tensor:
        """Return a weight by its name."""
        with safe_open(self._files[name], framework="pt") as opened:
            found: Tensor = opened.get_tensor(name)
        return found

    @cached_property
    def embed(self) -> nn.Embedding:
        """Token embedding."""
        weight = self._matrix(EMBEDDINGS, "token embedding")
        module = nn.Embedding(weight.shape[0], weight.shape[1], device="meta")
        module.weight = nn.Parameter(weight, requires_grad=False)
        return module

    @cached_property
    def _tied(self) -> bool:
        """Whether the lm_head is the embedding."""
        if not any(name.endswith(LM_HEADS) for name in self._files):
            return True
        says = self.config.get("tie_word_embeddings", self.text_config.get("tie_word_embeddings"))
        return torch.equal(self.embed.weight, self._matrix(LM_HEADS, "lm_head")) if says is None else bool(says)

    def _matrix(self, endings: tuple[str, ...], what: str) -> Tensor:
        name = self._only(endings, what)
        found = self.tensor(name)
        if found.dim() != 2 or not found.is_floating_point():
            raise ValueError(
                f"{name} of {self.name} must be a matrix of floating-point numbers, got {found.dtype} "
                f"{tuple(found.shape)}; give the target that is not quantized"
            )
        return found

    @cached_property
    def lm_head(self) -> nn.Linear:
        """Output projection; the embedding's weight where they are tied."""
        weight = self.embed.weight if self._tied else self._matrix(LM_HEADS, "lm_head")
        bias = [name for name in self._files if name.endswith("lm_head.bias")]
        module = nn.Linear(weight.shape[1], weight.shape[0], bias=bool(bias), device="meta")
        module.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias:
            module.bias = nn.Parameter(self.tensor(bias[0]), requires_grad=False)
        return module

    def _only(self, endings: tuple[str, ...], what: str) -> str:
        names = [name for name in self._files if name.endswith(endings)]
        if len(names) != 1:
            raise ValueError(
                f"cannot tell the {what} of {self.name}: expected one name that ends in {' or '.join(endings)}, "
                f"found {names}"
            )
        return names[0]

    @cached_property
    def fingerprint(self) -> str:
        """As `decode.Target` has it.

        Raises:
            ValueError: If the files cannot tell.
        """
        if strange := [name for name in self._files if name.startswith(BARE)]:
            raise ValueError(
                f"the files of {self.name} name weights otherwise than transformers' modules ({strange[0]}), so that "
                "nobody can tell by them which target it is: save it with save_pretrained"
            )
        names = [name for name in self._files if not (self._tied and name.endswith(LM_HEADS))]
        files = {RENAMED.get(name, name): name for name in names}
        vocab_size, hidden_size = self.lm_head.weight.shape
        return fingerprint(vocab_size, hidden_size, self.num_layers, files, lambda name: self.tensor(files[name]))


def find_model(name: str | Path) -> Path:
    """Return the folder of a model, downloaded if it is no folder but the name of one on the hub.

    Raises:
        ValueError: If it is neither.
    """
    return find_folder(name, what="model", files=["*.json", "*.safetensors"])


def _weight_map(folder: Path) -> Mapping[str, Any]:
    found = read_config(folder, INDEX).get("weight_map")
    if not isinstance(found, dict):
        raise ValueError(f"{folder / INDEX} has no weight_map; copy the target again")
    return found
