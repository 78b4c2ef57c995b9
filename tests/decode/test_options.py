"""Options of a dynamic tree fill up what the drafts' own tree leaves open."""

import argparse

import pytest

from decode import Chain, DynamicTree, StaticTree
from decode.options import add_tree_options, dynamic_tree, tree_settings

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
