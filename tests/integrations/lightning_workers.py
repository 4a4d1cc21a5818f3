"""Scripts with Lightning's Trainer and Fabric, for `test_scripts.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import torch
import torchmetrics
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from autopar.driver.lightning import AutoparFabricStrategy, AutoparStrategy
from tests.integrations.accelerate_workers import Labelled
from tests.integrations.trainer_workers import WORLD


class Tuned(lightning.LightningModule):
    """Trains with the model's loss, and validates with one of its own."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net
        self.norms: list[float] = []
        self.rows = torchmetrics.SumMetric()
        self.each = torchmetrics.Accuracy("multiclass", num_classes=net.config.vocab_size)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.net(**batch).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        logits = self.net(input_ids=batch["input_ids"]).logits
        self.rows.update(batch["labels"][:, 0] * 0 + 1)
        self.each.update(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        self.log("rows", self.rows)
        self.log("right", self.each)
        self.log(
            "held out",
            cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()),
        )

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])
        self.norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def script(make: Callable[[], Any], folder: str, *, is_plain: bool) -> dict[str, Any]:
    """Two epochs; the second again from the checkpoint of the first; and Fabric."""
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    strategy = (lambda: "auto") if is_plain else AutoparStrategy
    first, module = _fit(make, strategy(), keep)
    checkpoint = f"{folder}/epoch=0.ckpt"
    second, resumed = _fit(make, strategy(), None, checkpoint)
    saved = torch.load(checkpoint, weights_only=False)
    weights = saved["state_dict"] | {f"now.{k}": x for k, x in saved["current_model_state"].items()}
    return {
        "metrics": {name: float(value) for name, value in first.callback_metrics.items()},
        "resumed": {name: float(value) for name, value in second.callback_metrics.items()},
        "norms": module.norms,
        "resumed norms": resumed.norms,
        "checkpoint": {name: float(value.norm()) for name, value in weights.items()},
        "fabric": _fabric(make, "auto" if is_plain else AutoparFabricStrategy(), folder),
    }


def _fit(make: Any, strategy: Any, keep: Any, checkpoint: str | None = None) -> tuple[Any, Tuned]:
    trainer = lightning.Trainer(
        strategy=strategy, accelerator="cpu", devices=WORLD, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=0.5,
        accumulate_grad_batches=2,
        callbacks=[EMAWeightAveraging(decay=0.8), *([keep] if keep else [])],
        enable_checkpointing=keep is not None,
    )  # fmt: skip
    module = Tuned(make())
    trainer.fit(
        module, DataLoader(Labelled(16), 4), DataLoader(Labelled(8), 4), ckpt_path=checkpoint,
        weights_only=False,
    )  # fmt: skip
    return trainer, module


def _fabric(make: Any, strategy: Any, folder: str) -> list[float]:
    """Two steps, saved after the first; the second again from there."""
    fabric = lightning.Fabric(strategy=strategy, accelerator="cpu", devices=WORLD)
    fabric.launch()
    losses: list[float] = []
    for start in (0, 1):
        net = make()
        net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        loader = fabric.setup_dataloaders(DataLoader(Labelled(8), 4))
        if start:
            fabric.load(f"{folder}/fabric.ckpt", {"net": net, "optimizer": optimizer})
        for batch in list(loader)[start:]:
            with fabric.no_backward_sync(net, enabled=False):
                loss = net(**batch).loss
                fabric.backward(loss)
            fabric.clip_gradients(net, optimizer, max_norm=0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if not start and len(losses) == 1:
                fabric.save(f"{folder}/fabric.ckpt", {"net": net, "optimizer": optimizer})
    return losses
