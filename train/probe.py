"""Steps of a run that are made for their speed and thrown away."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import Accelerator

from data.batches import BatchPlan
from train.distributed import clip, prepare
from train.frozen import features_in_memory
from train.loop import accumulate_gradients, make_optimizer, schedule_factor
from train.pace import MEASURED, WARM_UP, Pace
from train.plan import Plan


def probe(accelerator: Accelerator, plan: Plan, say: Callable[[str], None]) -> None:
    """Make the first steps of a run, and say how long all take. The head is not what it was; nothing is written."""
    work, config = plan.work, plan.work.config
    source = features_in_memory(accelerator, config, work.target, work.samples, work.head.feature_layers)
    optimizer = make_optimizer(work.head, config.optim)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule_factor(config.optim, work.steps.stop))
    head, prepared, _ = prepare(accelerator, work.head, optimizer, scheduler)
    batches = BatchPlan(len(work.samples), config.optim.batch_size, config.run.seed)
    pace = Pace(work, source, say, plan.filling)
    for step in range(work.steps.start, work.steps.start + WARM_UP + MEASURED):
        indices = batches.indices(step)
        pace.begin()
        sums = accumulate_gradients(accelerator, head, source, indices, config.optim.accumulation)
        clip(accelerator, head, config.optim.max_grad_norm)  # with DeepSpeed it makes the step
        prepared.step()
        prepared.zero_grad()
        torch.stack(list(sums.values())).tolist()  # waits for the device
        pace.end(indices)
