"""Targets whose layers are on several devices: accelerate's hooks, the cache of each layer, what heads read."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from decode import Drafting, PromptLookup, Sampling, Target, UnsupportedTargetError, generate
from decode.capture import side_by_side
from decode.placed import join_ends
from heads import create_head, load_head, save_head
from heads.cache import TreeCache
from heads.eagle3 import Eagle3Config
from train.new_head import target_sizes

PARTS = ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.1", "model.norm", "lm_head")
ON_DISK = {**dict.fromkeys(PARTS, "cpu"), "model.layers.1": "disk"}
PROMPTS = [[5, 6, 7, 5, 6], [8, 9, 10, 11, 12], [13]]


@pytest.fixture(scope="module")
def folder(make_tiny_llama: Callable[..., LlamaForCausalLM], tiny_tokenizer, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "target"
    make_tiny_llama(tie_word_embeddings=False).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> Target:
    return Target.from_pretrained(str(folder), device="cpu")


@pytest.fixture(scope="module")
def placed(folder: Path) -> Target:
    """A target whose second layer is read from its file in every pass, and given up behind it."""
    return Target.from_pretrained(str(folder), device_map=ON_DISK)


def test_texts_are_those_of_the_whole_target(whole: Target, placed: Target):
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=[1, 2, 3])):
        expected = [row.token_ids for row in generate(whole, PROMPTS, sampling=sampling, max_new_tokens=20)]
        for proposer in (None, PromptLookup()):
            found = generate(placed, PROMPTS, sampling=sampling, max_new_tokens=20, proposer=proposer)
            assert [row.token_ids for row in found] == expected
    weights = placed.model.get_submodule("model.layers.1").parameters()
    assert all(weight.is_meta for weight in weights)  # nothing of it stayed


def test_a_head_that_reads_a_layer_on_another_device_drafts(whole: Target, placed: Target, tmp_path: Path):
    head = create_head("eagle3", Eagle3Config(feature_layers=(1, 2), **target_sizes(whole, Eagle3Config)), whole)
    save_head(head, tmp_path / "head", target=whole)
    texts, features = [], []
    for target in (whole, placed):
        drafting = Drafting.of(load_head(tmp_path / "head", target, dtype=torch.float64))
        texts.append([row.token_ids for row in generate(target, PROMPTS, proposer=drafting, max_new_tokens=12)])
        features.append(target.encode_features(torch.tensor([PROMPTS[0]]), [5], (1, 2))[1])
    assert texts[0] == texts[1]
    assert torch.equal(*features)


def test_it_is_the_same_target_and_is_left_as_accelerate_made_it(whole: Target, placed: Target):
    assert placed.fingerprint == whole.fingerprint
    assert placed.packed is None
    assert placed.device == torch.device("cpu")


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of several devices, as GPUs do and the meta device does not."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        places = {leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()}
        assert len(places) <= 1 or "copy" in str(func), f"{func} of {places}"
        return func(*args, **(kwargs or {}))


def test_each_layer_has_its_cache_on_its_own_device():
    with OneDevice():
        use_a_cache_on_two_devices()


def use_a_cache_on_two_devices() -> None:
    cache, places = TreeCache(2, 4), (torch.device("cpu"), torch.device("meta"))

    def write(nodes: int) -> None:
        cache.begin(nodes, places[0])
        for layer, place in enumerate(places):
            block = torch.zeros(len(cache.lengths), 1, nodes, 3, device=place)
            assert cache.write(layer, block, block)[0].device == place

    write(2)
    cache.commit([[0, 1], [0]])
    cache.reserve_for(3)
    write(3)  # rows differ in length
    cache.commit([[0, 2], [0, 1]])
    assert cache.lengths == [4, 3]
    cache.keep([1])
    write(1)
    assert [keys.device for keys, _ in cache.contents(0)] == list(places)


def test_features_of_several_devices_are_brought_to_one():
    parts = [torch.zeros(1, 2, 3), torch.zeros(1, 2, 3, device="meta")]
    joined = side_by_side(parts, torch.device("meta"))
    assert joined is not None
    assert (joined.shape, joined.device.type) == ((1, 2, 6), "meta")


class Far(nn.Linear):
    """An lm_head that says it is on another GPU."""

    moved_to: torch.device | None = None

    def get_parameter(self, target: str) -> SimpleNamespace:
        return SimpleNamespace(is_meta=False, device=torch.device("cuda", 1))

    def to(self, device: torch.device) -> "Far":
        self.moved_to = device
        return self


def test_the_lm_head_goes_where_the_embedding_is(make_tiny_llama: Callable[..., LlamaForCausalLM]):
    model = make_tiny_llama()
    model.lm_head = Far(32, 320, bias=False)
    join_ends(model)
    assert model.lm_head.moved_to == torch.device("cpu")
    assert model.lm_head._hf_hook.execution_device == torch.device("cpu")


@pytest.mark.parametrize("end", ["model.embed_tokens", "lm_head"])
def test_ends_that_are_on_no_device_are_refused(folder: Path, end: str):
    with pytest.raises(ValueError, match=r"no room on a device for embedding and lm_head.*quantize, or take more"):
        Target.from_pretrained(str(folder), device_map={**dict.fromkeys(PARTS, "cpu"), end: "disk"})


def test_a_model_that_a_user_has_spread_needs_its_ends_together(folder: Path):
    places = {**dict.fromkeys(PARTS, "cpu"), "lm_head": "disk"}
    model = LlamaForCausalLM.from_pretrained(folder, device_map=places)
    with pytest.raises(UnsupportedTargetError, match=r"spread over cpu, meta.*Target\.from_pretrained"):
        Target(model)
    kept = Target(LlamaForCausalLM.from_pretrained(folder, device_map=ON_DISK))
    assert kept.packed is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "everywhere"}, "unknown device_map 'everywhere'; use one of auto, balanced"),
        ({"device_map": "auto", "device": "cpu"}, r"device \(cpu\) or device_map \(auto\), not both"),
        ({"device_map": ON_DISK, "compile": True}, "leave quantize, device_map and shard out"),
    ],
)
def test_what_cannot_be_placed_is_a_clear_error(folder: Path, options: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        Target.from_pretrained(str(folder), **options)


@pytest.mark.parametrize("quantize", ["8bit", "4bit"])
def test_a_rounded_target_can_be_placed(tmp_path: Path, tiny_tokenizer: PreTrainedTokenizerFast, quantize: str):
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaForCausalLM.config_class(**sizes, num_attention_heads=2, max_position_embeddings=64)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    target = Target.from_pretrained(str(tmp_path), dtype="float32", device_map="auto", quantize=quantize)
    assert target.quantize == quantize
    texts = [generate(target, PROMPTS, max_new_tokens=6, proposer=proposer) for proposer in (None, PromptLookup())]
    assert [row.token_ids for row in texts[0]] == [row.token_ids for row in texts[1]]
