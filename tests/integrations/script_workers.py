"""What the processes of `test_scripts.py` do: the same scripts with plain and compiled models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import autopar
from tests.integrations import (
    accelerate_workers,
    lightning_workers,
    peft_workers,
    trainer_workers,
)
from tests.integrations.trainer_workers import gpt2


def plain() -> dict[str, Any]:
    """For one process."""
    return _scripts("plain", lambda model: model)


def compiled() -> dict[str, Any]:
    # A plan for a model as small as these would keep parameters whole.
    strategy = "fsdp" if trainer_workers.WORLD > 1 else None
    return _scripts(
        "compiled", lambda model: autopar.compile(model, constraints={"strategy": strategy})
    )


def _scripts(kind: str, prepared: Any) -> dict[str, Any]:
    def folder(name: str) -> str:
        path = Path(os.environ["SCRIPTS_FOLDER"]) / f"{name}-{kind}-{trainer_workers.WORLD}"
        path.mkdir(exist_ok=True)
        return str(path)

    return {
        "trainer": trainer_workers.script(lambda: prepared(gpt2()), folder("trainer")),
        "accelerate": accelerate_workers.script(
            lambda: prepared(gpt2(dropout=0.1)), folder("accelerate")
        ),
        "lightning": lightning_workers.script(
            lambda: prepared(gpt2()), folder("lightning"), is_plain=kind == "plain"
        ),
        "peft": peft_workers.script(lambda: prepared(peft_workers.lora()), folder("peft")),
    }
