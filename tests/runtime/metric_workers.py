"""Metrics of torchmetrics on outputs: the processes of `test_metrics.py`."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torchmetrics
from torch import Tensor

import autopar
from tests.runtime.sync_workers import Model
from tests.runtime.workers import whole


def made() -> dict[str, Any]:
    return {
        "sum": torchmetrics.SumMetric(),
        "mean": torchmetrics.MeanMetric(),
        "cat": torchmetrics.CatMetric(),
        "accuracy": torchmetrics.Accuracy("multiclass", num_classes=4),
        "confusion": torchmetrics.ConfusionMatrix("multiclass", num_classes=4),
        "auroc": torchmetrics.AUROC("multiclass", num_classes=4),
        "spearman": torchmetrics.SpearmanCorrCoef(num_outputs=4),
        "cosine": torchmetrics.CosineSimilarity(),
    }


def measured(model: Any, rows: slice = slice(None)) -> dict[str, Tensor]:
    """What metrics make of three batches, of which this rank has `rows` of labels."""
    metrics = made()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        x = torch.randn(12, 8, generator=generator)[rows]
        labels = torch.randint(4, (12,), generator=generator)[rows]
        out = model(x)[1].detach()
        target = out * 0.5 + x[:, :4]
        for name in ("sum", "mean"):
            metrics[name].update(out)
        metrics["cat"].update(out.argmax(-1).float())
        for name in ("accuracy", "confusion"):
            metrics[name].update(out, labels)
        metrics["auroc"].update(out.softmax(-1), labels)
        for name in ("spearman", "cosine"):
            metrics[name].update(out, target)
    return {name: metric.compute() for name, metric in metrics.items()}


def metrics() -> dict[str, float]:
    """How far metrics are from those of one process."""
    inputs = os.environ["INPUTS"]
    wanted = measured(Model())
    model: Any = autopar.compile(
        Model(), constraints={"strategy": os.environ["STRATEGY"]}, inputs=inputs
    )  # pyright: ignore[reportArgumentType]
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = slice(rank, None, size) if inputs == "local" else slice(None)
    found = measured(model, rows)
    off: dict[str, float] = {}
    for name, value in found.items():
        ours, theirs = whole(value), wanted[name]
        if name == "cat":
            ours, theirs = ours.sort().values, theirs.sort().values
        assert ours.shape == theirs.shape, (name, ours.shape, theirs.shape)
        off[name] = float((ours - theirs).abs().max())
    if rank == 0 and inputs == "global":
        metric = torchmetrics.SumMetric()
        metric.update(model.line.weight.detach())
        off["alone"] = abs(float(metric.compute()) - float(Model().line.weight.detach().sum()))
    return off
