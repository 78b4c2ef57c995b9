"""Draft heads: small modules trained on the states of a frozen target to guess several tokens ahead.

A head is one file here that ends in `HEAD = …`; it is found by its file name. This package knows torch and safetensors
only, and asks huggingface_hub for what is named and not here.
"""

from heads.adopt import adopt
from heads.base import Drafter, FeatureBatch, Head, HeadConfig, HeadOutput, Lender, create_head, head_class
from heads.checkpoint import HeadNotes, load_head, read_notes, save_head, write_notes
from heads.export import export
from heads.publish import push_to_hub

__all__ = [
    "Drafter",
    "FeatureBatch",
    "Head",
    "HeadConfig",
    "HeadNotes",
    "HeadOutput",
    "Lender",
    "adopt",
    "create_head",
    "export",
    "head_class",
    "load_head",
    "push_to_hub",
    "read_notes",
    "save_head",
    "write_notes",
]
