"""The device that models of tests are on."""

from __future__ import annotations

import os

import torch
from torch import nn

VARIABLE = "AUTOPAR_TEST_DEVICE"


def device(otherwise: str = "cpu") -> torch.device:
    """What the environment says, at the time of the call: processes are forked for several."""
    return torch.device(os.environ.get(VARIABLE, otherwise))


def there(model: nn.Module) -> nn.Module:
    """The model on the device, unless it is on none yet."""
    is_meta = any(param.is_meta for param in model.parameters())
    return model if is_meta else model.to(device())
