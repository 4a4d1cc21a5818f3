"""The training examples on two processes of torchrun: the losses of one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTForCausalLM

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.processes


def losses(script: str, num_processes: int, folder: Path, *options: str) -> list[float]:
    """What the script writes to `--losses`, run as a user would."""
    found = folder / f"{script}-{num_processes}.json"
    launch = [sys.executable]
    if num_processes > 1:
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
        launch += ["--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command = [*launch, str(EXAMPLES / script), "--losses", str(found), *options]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(EXAMPLES.parent), str(EXAMPLES)])}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    result: list[float] = json.loads(found.read_text())
    return result


@pytest.mark.nightly
@pytest.mark.parametrize("script", ["finetune_opt.py", "trainer_opt.py"])
def test_two_processes_train_as_one(script: str, tmp_path: Path) -> None:
    saved = [tmp_path / f"saved-{n}" for n in (1, 2)]
    one = losses(script, 1, tmp_path, "--steps", "4", "--save", str(saved[0]))
    two = losses(script, 2, tmp_path, "--steps", "4", "--save", str(saved[1]))
    assert len(one) == 4 and one[-1] < one[0]
    assert two == pytest.approx(one, rel=1e-4)
    models: list[Any] = [OPTForCausalLM.from_pretrained(path) for path in saved]
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert (p - q).abs().max() < 1e-4
