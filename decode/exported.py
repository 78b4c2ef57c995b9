"""Whether an exported folder drafts what its head drafts: reloaded and asked on real prompts, without any engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from decode.draft_model import DraftModel
from decode.generation import DRAFT_LENGTH, generate
from decode.grow import Chain
from decode.prompts import Prompt
from decode.propose import Drafting, Drafts, Proposer
from decode.recorded import Beside, Recorded
from decode.results import Generation, Stats
from decode.target import Target
from heads import adopt, load_head
from heads.checkpoint import stored_dtype

NO_GGUF = "a GGUF file cannot be checked here; check an export to eagle3, of which such files are made"


@dataclass(frozen=True)
class Comparison:
    """Drafts of a head and of its export, in the same steps."""

    steps: int
    same: int
    """Steps in which both drafted the same tokens."""
    excuses: list[str]
    """Why they need not: what differs between them, in sentences."""
    head: float
    """Tokens per step."""
    export: float
    """Tokens per step."""

    @property
    def passed(self) -> bool:
        """Whether all drafts are the same, or it is known why not."""
        return self.steps > 0 and (self.same == self.steps or bool(self.excuses))

    def lines(self) -> list[str]:
        """Return what there is to say."""
        found = [f"the same drafts in {self.same} of {self.steps} steps"]
        found += [f"they may differ: {excuse}" for excuse in self.excuses if self.same < self.steps]
        return [*found, f"tokens per step: {self.head:.2f} with the head, {self.export:.2f} with the export"]


def compare_export(
    target: Target,
    head: str | Path,
    out: str | Path,
    prompts: Sequence[Prompt],
    *,
    to: str,
    max_new_tokens: int = 64,
) -> Comparison:
    """Decode prompts greedily with a head's chains, and let its export draft beside it.

    Args:
        target: The target.
        head: Head folder, or the folder of a draft model.
        out: What `heads.export` wrote.
        prompts: Text, chat messages or token ids.
        to: The format it wrote; any but "gguf".
        max_new_tokens: Limit for each.

    Raises:
        ValueError: If what was written cannot be read, or a prompt cannot be decoded.
    """
    if to == "gguf":
        raise ValueError(NO_GGUF)
    both = _both_models if to == "hf" else _both_heads
    first, second, excuses = both(head, out, target)
    depth = min(DRAFT_LENGTH, first.drafter().max_depth, second.drafter().max_depth)
    kept, thrown = (Recorded(Drafting(drafts, Chain(depth))) for drafts in (first, second))
    pairs, by_text = [], []
    for prompt in prompts:
        by_text.append(_stats(target, prompt, Beside(kept, thrown), max_new_tokens))
        pairs += list(zip(kept.rows[0], thrown.rows[0], strict=True))
    same = sum(ours == theirs for ours, theirs in pairs)
    again = by_text if same == len(pairs) else [_stats(target, prompt, thrown, max_new_tokens) for prompt in prompts]
    rates = [Stats.total(stats).tokens_per_step for stats in (by_text, again)]
    return Comparison(len(pairs), same, excuses, rates[0], rates[1])


def _both_models(model: str | Path, out: str | Path, target: Target) -> tuple[Drafts, Drafts, list[str]]:
    """Load a draft model and its copy."""
    first, second = (DraftModel.from_pretrained(folder, target) for folder in (model, out))
    return first, second, []


def _both_heads(head: str | Path, out: str | Path, target: Target) -> tuple[Drafts, Drafts, list[str]]:
    """Load a head and what was written of it; also return how they differ."""
    first = load_head(head, target)
    with TemporaryDirectory() as folder:
        adopt(out, folder, target=target.name)
        second = load_head(folder, target)
        if list(second.feature_layers) != list(first.feature_layers):
            raise ValueError(
                f"{out} reads the target's layers {list(second.feature_layers)}, but the head {head} reads "
                f"{list(first.feature_layers)}: it is an export of another head"
            )
        precisions = [str(stored_dtype(stored)).removeprefix("torch.") for stored in (head, folder)]
    sizes = [len(one.vocabulary) if one.vocabulary is not None else one.config.vocab_size for one in (first, second)]
    excuses = []
    if precisions[0] != precisions[1]:
        excuses.append(f"the head's weights are {precisions[0]}, the export's {precisions[1]}")
    if sizes[0] != sizes[1]:
        excuses.append(f"the head drafts from {sizes[0]} tokens, the export from {sizes[1]}")
    return first, second, excuses


def _stats(target: Target, prompt: Prompt, proposer: Proposer, max_new_tokens: int) -> Stats:
    result = generate(target, prompt, proposer=proposer, max_new_tokens=max_new_tokens)
    assert isinstance(result, Generation)
    return result.stats
