"""Exact decoding of a Hugging Face causal LM with drafted token trees."""

from decode.accept import Block, Match, Rejection
from decode.adaptive_lookup import AdaptiveLookup
from decode.costs import VerifyCosts, measure_costs
from decode.draft_model import DraftModel
from decode.dynamic import DynamicTree
from decode.generation import generate, stream
from decode.grow import Chain, StaticTree
from decode.lookup import PromptLookup
from decode.propose import Drafting
from decode.results import Delta, Generation, Stats
from decode.sampling import Sampling
from decode.support import UnsupportedTargetError
from decode.target import Target
from decode.typical import Typical

__all__ = [
    "AdaptiveLookup",
    "Block",
    "Chain",
    "Delta",
    "DraftModel",
    "Drafting",
    "DynamicTree",
    "Generation",
    "Match",
    "PromptLookup",
    "Rejection",
    "Sampling",
    "StaticTree",
    "Stats",
    "Target",
    "Typical",
    "UnsupportedTargetError",
    "VerifyCosts",
    "generate",
    "measure_costs",
    "stream",
]
