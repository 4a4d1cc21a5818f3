"""What the processes of `test_files.py` do: files that scripts and peft write."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

import autopar
from tests.grouped import grouped
from tests.runtime.workers import batch, distance, gpt2, net, points, slow_devices, whole

CONFIG: Any = LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True)


def options() -> dict[str, Any]:
    several = os.environ.get("WORLD_SIZE", "1") != "1"
    return {"cluster": slow_devices(2), "strategy": "fsdp"} if several else {}


def saved() -> dict[str, Any]:
    """What `torch.save` and `save_file` write of a model and its optimizer, and what loads it."""
    pairs: list[tuple[Any, torch.optim.Optimizer]] = []
    for model in (autopar.compile(net(), **grouped(**options())), net()):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(*points())["loss"].backward()
        optimizer.step()
        pairs.append((model, optimizer))
    (ours, our_steps), (theirs, their_steps) = pairs
    wanted = theirs.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        save_file(ours.state_dict(), Path(folder) / "model.safetensors")
        state = {"model": ours.state_dict(), "steps": our_steps.state_dict()}
        torch.save(state, Path(folder) / "state.pt")
        loaded = load_file(Path(folder) / "model.safetensors")
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
    peak_candidates = [x["state"][0]["exp_avg"] for x in (state["steps"], their_steps.state_dict())]
    again = net()
    again.load_state_dict(state["model"])
    ours.load_state_dict(state["model"])
    our_steps.load_state_dict(state["steps"])
    return {
        "safetensors": max(distance(x, wanted[name]) for name, x in loaded.items()),
        "torch": max(distance(x, wanted[name]) for name, x in state["model"].items()),
        "optimizer": distance(*peak_candidates),
        "again": distance(again(*points())["loss"], theirs(*points())["loss"]),
        "ours": distance(ours(*points())["loss"], theirs(*points())["loss"]),
    }


def adapters() -> dict[str, Any]:
    """A compiled model inside of peft's, and a plain one: trained, saved, loaded and merged."""
    models: list[Any] = []
    for base in (autopar.compile(gpt2(), **grouped(**options())), gpt2()):
        torch.manual_seed(1)
        models.append(get_peft_model(base, CONFIG))
    ours, theirs = models
    found: dict[str, float] = {}

    def compare(name: str) -> None:
        found[name] = distance(ours(**batch(0)).loss, theirs(**batch(0)).loss)

    for model in models:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=5.0)
        for step in range(3):
            model(**batch(step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    compare("trained")
    wanted = get_peft_model_state_dict(theirs)
    # Each rank has a folder of its own, as what runs on several machines has.
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        loaded = load_file(Path(folder) / "adapter_model.safetensors")
        plain = PeftModel.from_pretrained(gpt2(), folder)
        inside = PeftModel.from_pretrained(autopar.compile(gpt2(), **grouped(**options())), folder)
        for model in models:
            model.load_adapter(folder, "other")
    found["file"] = max(distance(loaded[k] + 1, v + 1) for k, v in wanted.items())
    found["plain"] = distance(plain(**batch(0)).loss, theirs(**batch(0)).loss)
    found["inside"] = distance(inside(**batch(0)).loss, theirs(**batch(0)).loss)
    state = get_peft_model_state_dict(ours)
    found["state"] = max(distance(whole(x) + 1, wanted[k] + 1) for k, x in state.items())
    with ours.disable_adapter(), theirs.disable_adapter():
        compare("off")
    for model in models:
        model.set_adapter("other")
    compare("other")
    for model in models:
        model.merge_adapter()
    compare("merged")
    ours, theirs = (model.merge_and_unload() for model in models)
    compare("unloaded")
    assert isinstance(ours, nn.Module)
    return found


def both() -> dict[str, Any]:
    return {"saved": saved(), "adapters": adapters()}
