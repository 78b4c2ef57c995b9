"""What a run is made from: encoded conversations to train on, and prompts to evaluate with."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from data.conversations import Conversation, Encoded, encode_all, load_conversations
from decode import Target
from decode.prompts import Prompt, read_prompts, to_token_ids
from train.config import ConfigError, RunConfig, naming


@dataclass(frozen=True)
class Inputs:
    """What is trained on and what is evaluated with."""

    samples: Sequence[Encoded]
    prompts: Mapping[str, Sequence[list[int]]]
    """Prompt set -> token ids, the opening of the answer included; empty without an evaluation."""

    def hash(self, target: Target) -> str:
        """Return a hash of the target's weights and of all tokens and masks trained on, in order."""
        digest = hashlib.sha256(target.fingerprint.encode())
        for sample in self.samples:
            digest.update(array("q", sample.token_ids).tobytes())
            digest.update(bytes(sample.loss_mask))
        return digest.hexdigest()[:16]

    def describe(self) -> str:
        """Return how much there is of what, for people, and a warning if it teaches nothing."""
        tokens = sum(len(sample.token_ids) for sample in self.samples)
        supervised = sum(sum(sample.loss_mask) for sample in self.samples)
        sets = ", ".join(f"{len(prompts)} prompts of {name}" for name, prompts in self.prompts.items())
        lines = (
            f"data: {len(self.samples)} conversations, {tokens} tokens, {supervised / tokens:.1%} of them supervised; "
            f"evaluation: {sets or 'none'}"
        )
        # as in `heads.labels`: the first token of an answer is the target's own, and a root has a state before it
        if not any(all(pair) for sample in self.samples for pair in pairwise(sample.loss_mask[1:])):
            lines += (
                f"\nwarning: none of the {supervised} supervised tokens follows another one, so none can be drafted: "
                "heads learn nothing and their loss is 0; see `python -m data.conversations preview`"
            )
        return lines


def load_inputs(config: RunConfig, target: Target) -> Inputs:
    """Load and encode the conversations, and set the evaluation's prompts apart.

    Raises:
        ValueError: If the data do not suit the target, or nothing is left to train on.
    """
    if target.tokenizer is None:
        raise ConfigError(f"target {target.name} has no tokenizer; give a folder or name that has one")
    if config.data.max_length > target.max_length:
        raise ConfigError(
            f"data.max_length is {config.data.max_length}, but {target.name} was made for {target.max_length} tokens"
        )
    with naming("data.source", "give a file, or the name of a data set, that can be read"):
        conversations = load_conversations(config.data.source, limit=config.data.limit)
    wanted = config.eval.num_prompts
    sets: dict[str, dict[str, Prompt]] = {}  # set -> what errors call a prompt -> the prompt
    if wanted and config.eval.prompts:
        for file in config.eval.prompts:
            with naming("eval.prompts", "give files that can be read"):
                rows = read_prompts(file, limit=wanted)
            sets[Path(file).stem] = {f"{number} of {file}": prompt for number, prompt in enumerate(rows, 1)}
    elif wanted:
        if len(conversations) <= wanted:
            raise ConfigError(
                f"{config.data.source} has {len(conversations)} conversations, and eval.num_prompts={wanted} of them "
                "are held out: nothing is left to train on; lower eval.num_prompts, or set eval.prompts"
            )
        # by a hash of the id: files are sorted by length or topic, and their ends are not like the rest
        chosen = {c.id for c in sorted(conversations, key=lambda c: hashlib.sha256(c.id.encode()).digest())[:wanted]}
        sets["held_out"] = {c.id: _question(c) for c in conversations if c.id in chosen}
        conversations = [conversation for conversation in conversations if conversation.id not in chosen]
    prompts = {
        name: [_prompt_ids(config, target, prompt, label) for label, prompt in labelled.items()]
        for name, labelled in sets.items()
    }
    data = config.data
    samples = encode_all(conversations, target.tokenizer, max_length=data.max_length, turns=data.turns)
    return Inputs(samples, prompts)


def _question(conversation: Conversation) -> Prompt:
    """Return a conversation without its last answer."""
    messages = conversation.messages
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def _prompt_ids(config: RunConfig, target: Target, prompt: Prompt, label: str) -> list[int]:
    """Return the tokens of a prompt, followed by the opening of an answer."""
    token_ids = to_token_ids(target, prompt, raw=False)
    if len(token_ids) + config.eval.max_new_tokens > target.max_length:
        raise ConfigError(
            f"evaluation prompt {label} has {len(token_ids)} tokens: with eval.max_new_tokens="
            f"{config.eval.max_new_tokens} that is more than the target's {target.max_length}; remove it"
        )
    return token_ids
