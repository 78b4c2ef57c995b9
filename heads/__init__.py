"""Draft heads: small modules trained on the states of a frozen target to guess several tokens ahead.

A head is one file here that ends in `HEAD = …`; it is found by its file name. This package knows torch and safetensors
only.
"""

from heads.adopt import adopt
from heads.base import Drafter, FeatureBatch, Head, HeadConfig, HeadOutput, Lender, create_head, head_class
from heads.checkpoint import HeadNotes, load_head, read_notes, save_head, write_notes
from heads.export import export

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
    "read_notes",
    "save_head",
    "write_notes",
]
