"""The same training in one process: torch's own optimizer on the whole model, the whole batch in one pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dslaunch.planfile import plan_from_json, to_json
from dslaunch.runtime.data import open_data
from dslaunch.runtime.graph import build_model
from dslaunch.runtime.schedule import make_scheduler
from tests.real.hetero_ranks import SAMPLES, Case, Masked, plan_of


@dataclass(frozen=True)
class Reference:
    """What each step gave."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, torch.Tensor]]
    """Before clipping, by name in the whole model."""
    parameters: dict[str, torch.Tensor]
    """After the last step."""


def train_alone(case: Case, dtype: torch.dtype) -> Reference:
    """Loss, norm and gradients of each step in `dtype`, from the same start values."""
    torch.set_num_threads(1)
    plan = plan_from_json(to_json(plan_of(case)), "plan.json")
    data: Any = open_data(plan)
    data = Masked(data) if case.masked else data
    model = build_model(plan).to(dtype)
    groups = [
        {"params": list(model.parts[name].parameters()), "lr": at.lr, "weight_decay": at.weight_decay}
        for name, at in case.layouts.items()
        if name not in case.frozen
    ]
    kinds: dict[str, Any] = {
        "AdamW": lambda: torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-4),
        "SGD": lambda: torch.optim.SGD(groups, lr=1.0),
    }
    optimizer = kinds[case.optimizer]()
    scheduler = make_scheduler(optimizer, plan.training)
    losses, norms, gradients = [], [], []
    for step in range(case.steps):
        batch = data.at(range(step * SAMPLES, (step + 1) * SAMPLES))
        loss = model(batch)
        loss.backward()
        found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip or float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
        gradients.append(found)
    return Reference(losses, norms, gradients, {n: p.detach().clone() for n, p in model.named_parameters()})
