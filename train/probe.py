"""Steps of a run that are made for their speed and thrown away."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator

from data.batches import BatchPlan
from data.features import OnlineFeatures
from train.loop import accumulate_gradients
from train.pace import MEASURED, WARM_UP, Pace
from train.plan import Plan


def probe(accelerator: Accelerator, plan: Plan, say: Callable[[str], None]) -> None:
    """Make the first steps of a run, and say how long all take. The head is not what it was; nothing is written."""
    work, config = plan.work, plan.work.config
    memory = int(config.data.feature_memory * 2**30)
    source = OnlineFeatures(work.target, work.samples, memory, work.head.feature_layers)
    optimizer = torch.optim.AdamW(work.head.parameters(), lr=config.optim.lr)
    head, optimizer = accelerator.prepare(work.head.train(), optimizer)
    batches = BatchPlan(len(work.samples), config.optim.batch_size, config.run.seed)
    pace = Pace(work, source, say, plan.filling)
    for step in range(work.steps.start, work.steps.start + WARM_UP + MEASURED):
        indices = batches.indices(step)
        pace.begin()
        sums = accumulate_gradients(accelerator, head, source, indices, config.optim.accumulation)
        optimizer.step()
        optimizer.zero_grad()
        torch.stack(list(sums.values())).tolist()  # waits for the device
        pace.end(indices)
