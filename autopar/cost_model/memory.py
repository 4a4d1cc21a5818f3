"""Bytes a training step holds per parameter, by optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import AutoparError

OPTIMIZERS: Mapping[str, int] = {
    "sgd": 0,
    "sgd-momentum": 1,
    "adagrad": 1,
    "rmsprop": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "adamax": 2,
    "nadam": 2,
    "radam": 2,
    "adadelta": 2,
    "rprop": 2,
    "asgd": 1,
    "muon": 1,
    "adafactor": 0,
    "none": 0,
}
"""How many tensors of a parameter's size and dtype each optimizer of torch.optim keeps. What
Adafactor keeps is one row and one column; Muon and Adafactor hold one whole parameter more while
they step, and LBFGS, which is not listed, all of them whole."""


def states_per_param(optimizer: str) -> int:
    """Entries of `OPTIMIZERS`; AutoparError, listing them, for another name."""
    try:
        return OPTIMIZERS[optimizer.lower()]
    except KeyError:
        known = ", ".join(OPTIMIZERS)
        raise AutoparError(f"optimizer {optimizer!r} is not known: name one of {known}") from None
