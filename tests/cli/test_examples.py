"""The targets in `examples/`, and that building one takes no memory."""

from __future__ import annotations

from pathlib import Path

import torch
from click.testing import CliRunner

from autopar.cli.main import main
from autopar.driver.target import load_target
from autopar.runtime.module.building import Built, build

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def built(target: str, batch: int, *, on_meta: bool = True, seed: int = 0) -> Built:
    return build(load_target(str(EXAMPLES / target)), batch, on_meta=on_meta, seed=seed)


def test_eight_billion_parameters_without_memory() -> None:
    llama = built("build_llama.py:build", 64)
    assert sum(param.numel() for param in llama.model.parameters()) == 8_030_261_248
    assert all(param.is_meta for param in llama.model.parameters())
    assert {param.dtype for param in llama.model.parameters()} == {torch.bfloat16}
    assert isinstance(llama.inputs, dict)
    assert llama.inputs["labels"].shape == (64, 2048)


def test_real_models_depend_on_the_seed_alone() -> None:
    def weights(seed: int) -> torch.Tensor:
        model = built("build_llama.py:build_tiny", 2, on_meta=False, seed=seed).model
        return torch.cat([param.detach().flatten() for param in model.parameters()])

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_tiny_llama_is_planned_and_verified(tmp_path: Path) -> None:
    target, plan = str(EXAMPLES / "build_llama.py:build_tiny"), str(tmp_path / "plan.json")
    options = ["--global-batch", "4"]
    command = ["plan", target, *options, "--cluster", "2xcpu", "-o", plan]
    planned = CliRunner().invoke(main, command)
    assert planned.exit_code == 0, planned.stderr
    assert "model.layers.*" in planned.stdout
    verified = CliRunner().invoke(main, ["verify", plan, target, *options])
    assert verified.exit_code == 0, verified.stderr
    assert "2 ranks against eager, float32, tolerance 1e-05" in verified.stdout
