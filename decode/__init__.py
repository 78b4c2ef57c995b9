"""Exact decoding of a Hugging Face causal LM with drafted token trees."""

from decode.accept import Match, Rejection
from decode.generation import generate, stream
from decode.grow import Chain, StaticTree
from decode.propose import Drafting, PromptLookup
from decode.results import Delta, Generation, Stats
from decode.sampling import Sampling
from decode.support import UnsupportedTargetError
from decode.target import Target

__all__ = [
    "Chain",
    "Delta",
    "Drafting",
    "Generation",
    "Match",
    "PromptLookup",
    "Rejection",
    "Sampling",
    "StaticTree",
    "Stats",
    "Target",
    "UnsupportedTargetError",
    "generate",
    "stream",
]
