"""Options that several commands share: the target's, and those of a dynamic tree, which fill up the drafts' own."""

import argparse

import pytest
import torch

from decode import Chain, DynamicTree, StaticTree
from decode.machine import machine
from decode.options import add_target_options, add_tree_options, dynamic_tree, load_target, tree_settings

OWN = DynamicTree(5, 4, 16, confidence=0.1, temperature=0.5)
WIDE = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1)))


@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        (OWN, "--tree-confidence 0.3", DynamicTree(5, 4, 16, 0.3, 0.5)),
        (OWN, "--tree-confidence 0", DynamicTree(5, 4, 16, 0.0, 0.5)),
        (OWN, "--tree-size 8 --tree-width 2", DynamicTree(5, 2, 8, 0.1, 0.5)),
        (OWN, "--tree-width 1", DynamicTree(5, 1, 6, 0.1, 0.5)),
        (OWN, "--tree-width 1 --tree-size 3", DynamicTree(5, 1, 3, 0.1, 0.5)),
        (WIDE, "--tree-depth 2", DynamicTree(2, 3, 6)),
        (WIDE, "--tree-depth 8", DynamicTree(8, 3, 9)),
        (Chain(4), "--tree-confidence 0.5", DynamicTree(4, 1, 5, 0.5)),
        (Chain(4), "--tree-depth 6", DynamicTree(6, 1, 7)),
        (Chain(4), "--tree-width 3 --tree-size 12", DynamicTree(4, 3, 12)),
    ],
)
def test_what_is_left_out_is_as_in_the_drafts_own_tree(own, options, expected):
    parser = argparse.ArgumentParser()
    add_tree_options(parser)
    assert dynamic_tree(tree_settings(parser.parse_args(options.split())), own) == expected
    assert tree_settings(parser.parse_args([])) == {}


@pytest.mark.parametrize(("options", "layers"), [([], "packed"), (["--compile"], "compiled")])
def test_the_target_is_loaded_as_it_is_asked_for(
    make_tiny_llama, tiny_tokenizer, tmp_path, monkeypatch, options, layers
):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    make_tiny_llama(dtype=torch.float64).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    parser = argparse.ArgumentParser()
    add_target_options(parser)
    args = parser.parse_args([str(tmp_path), "--device", "cpu", "--dtype", "float32", *options])
    for keep in (True, False):
        target = load_target(args, keep_weights=keep)
        assert (machine(target)["layers"], machine(target)["dtype"]) == (layers, "float32")
        kept = not any(parameter.is_meta for parameter in target.model.parameters())
        assert kept == (keep or layers == "compiled")
    with pytest.raises(OSError, match=r"^cannot load the model no/where: "):
        load_target(parser.parse_args(["no/where"]))
