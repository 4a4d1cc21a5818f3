"""The device that models of tests are on."""

from __future__ import annotations

import os

import torch

VARIABLE = "AUTOPAR_TEST_DEVICE"


def device(otherwise: str = "cpu") -> torch.device:
    """What the environment says, at the time of the call: processes are forked for several."""
    return torch.device(os.environ.get(VARIABLE, otherwise))
