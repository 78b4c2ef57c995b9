"""Answers by a target that is loaded here, a batch at a time."""

import time
from collections.abc import Sequence
from typing import NoReturn

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.answers import AnswerFile
from data.conversations import Conversation
from data.distill_config import DistillConfig, Tally
from data.questions import encode_prompt, prompt_seed, to_row
from decode import Sampling, Target, generate


def answer_batches(
    batches: Sequence[Sequence[Conversation]],
    answers: AnswerFile,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    config: DistillConfig,
    tally: Tally,
    progress: "tqdm[NoReturn]",
) -> None:
    """Answer the prompts, write each batch as it is done, and count in `tally`."""
    start = time.perf_counter()
    for batch in batches:
        seeds = [prompt_seed(config.seed, prompt.id) for prompt in batch]
        sampling = Sampling(temperature=config.temperature, top_p=config.top_p, seed=seeds)
        token_ids = [encode_prompt(prompt, tokenizer) for prompt in batch]
        generations = generate(target, token_ids, sampling=sampling, max_new_tokens=config.max_new_tokens)
        assert isinstance(generations, list)  # a list of prompts was passed
        pairs = zip(batch, generations, strict=True)
        answers.append([to_row(prompt, made.text, is_cut=made.finish_reason == "length") for prompt, made in pairs])
        tally.new_answers += len(batch)
        tally.new_tokens += sum(len(generation.token_ids) for generation in generations)
        progress.set_postfix_str(f"{tally.new_tokens / (time.perf_counter() - start):.1f} tokens/s", refresh=False)
        progress.update(len(batch))
