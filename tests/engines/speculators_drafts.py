"""`python speculators_drafts.py JOB OUT`: what the speculators library drafts. Runs in its own environment, not ours.

JOB is a JSON file: `model` (the target), `head`, `convert` (null, or options with which the library's converter is run
on the head first, to the folder `converted`), `texts` (token ids of prompt and answer), `steps` (for each text, places
and drafts) and `layers` that the head reads. OUT gets, for each text and place, what the library drafts where it is fed
the drafts one by one.
"""

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.convert import convert_model
from transformers import AutoModelForCausalLM


def load(head):
    config = SpeculatorModelConfig.from_pretrained(head)
    config.transformer_layer_config._attn_implementation = "eager"  # else it compiles
    return SpeculatorModel.from_pretrained(head, config=config).float().eval()


def draft(head, features, context, drafts):
    """Chain behind `context`; its last token has no state yet, and those of drafts are not read."""
    tokens = torch.tensor([*context[1:], *drafts])
    states = torch.zeros(len(tokens), features.shape[1])
    states[: len(context) - 1] = features[: len(context) - 1]
    chain = head(states[None], tokens[None], torch.zeros(1, len(tokens), dtype=torch.long), ttt_steps=len(drafts))
    ids = [int(level[0, len(context) - 2]) for level in chain]
    return ids if head.d2t is None else [i + int(head.d2t[i]) for i in ids]


def main(job, out):
    job = json.loads(Path(job).read_text())
    target = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    head = job["head"]
    if job["convert"] is not None:
        convert_model(head, job["model"], "eagle3", output_path=job["converted"], **job["convert"])
        head = job["converted"]
    head, found = load(head), []
    with torch.no_grad():
        for text, steps in zip(job["texts"], job["steps"], strict=True):
            states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
            features = torch.cat([states[layer][0] for layer in job["layers"]], dim=-1)
            found.append([draft(head, features, text[:place], drafts) for place, drafts in steps])
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
