"""`python vllm_drafts.py JOB OUT`: what vLLM drafts, step by step. Runs in vLLM's own environment, not ours.

JOB is a JSON file: `model`, `speculative` (vLLM's speculative_config, or null to take it from the model's own folder),
`prompts` of token ids, `eos_ids`, `max_new_tokens`, `max_length` and `rows`: all prompts are decoded once for each of
these numbers of prompts at a time. OUT gets a run for each: `texts`, the new tokens of each prompt, and `steps`, for
each prompt the new tokens so far at every step and what was drafted behind them.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # so that the runner is in this process
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class Recorder:
    """Keeps what the runner proposes for each request."""

    def __init__(self, runner):
        self.steps = {}
        self._runner = runner
        self._propose = runner.propose_draft_token_ids
        self._last = {}
        runner.propose_draft_token_ids = self.propose

    def propose(self, scheduler_output, sampled_token_ids, *args, **kwargs):
        drafts = self._propose(scheduler_output, sampled_token_ids, *args, **kwargs)
        rows = self._runner.input_batch.req_ids
        for request, sampled, drafted in zip(rows, as_lists(sampled_token_ids), as_lists(drafts), strict=True):
            steps = self.steps.setdefault(request, [])
            before = steps[-1]["text"] if steps else 0
            steps.append({"text": before + sum(token >= 0 for token in sampled), "drafts": drafted})
        return drafts


def as_lists(rows):
    return rows if isinstance(rows, list) else rows.tolist()


def main(job, out):
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job).read_text())
    options = {"skip_tokenizer_init": True, "dtype": "float32", "enforce_eager": True, "seed": 0}
    options |= {"max_model_len": job["max_length"], "max_num_seqs": max(job["rows"]), "disable_log_stats": False}
    options |= {"enable_prefix_caching": False}  # of the run before
    if job["speculative"] is not None:
        options["speculative_config"] = job["speculative"]
    llm = LLM(model=job["model"], **options)
    recorder = Recorder(llm.llm_engine.model_executor.driver_worker.worker.model_runner)
    greedy = SamplingParams(
        temperature=0,
        max_tokens=job["max_new_tokens"],
        detokenize=False,
        ignore_eos=True,
        stop_token_ids=job["eos_ids"],
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    runs = [decode(llm, recorder, prompts, greedy, rows) for rows in job["rows"]]
    Path(out).write_text(json.dumps(runs))


def decode(llm, recorder, prompts, sampling, rows):
    texts, steps = [], []
    for start in range(0, len(prompts), rows):
        for result in llm.generate(prompts[start : start + rows], sampling, use_tqdm=False):
            texts.append(list(result.outputs[0].token_ids))
        found = sorted(recorder.steps.items(), key=lambda item: int(item[0].split("-")[0]))  # requests are counted
        steps += [one for _, one in found]
        recorder.steps.clear()
    return {"texts": texts, "steps": steps}


if __name__ == "__main__":
    main(*sys.argv[1:])
