"""Every class of `torch.optim` under settings that change what is kept or read, and its names."""

from __future__ import annotations

from typing import Any

from torch import optim
from transformers.optimization import Adafactor

LR = {"lr": 0.1}
VARIANTS: tuple[tuple[str, type[optim.Optimizer], dict[str, Any]], ...] = (
    ("sgd", optim.SGD, LR),
    ("sgd-momentum", optim.SGD, {**LR, "momentum": 0.9}),
    ("sgd-momentum-nesterov", optim.SGD, {**LR, "momentum": 0.9, "nesterov": True}),
    ("sgd-decay-maximize", optim.SGD, {**LR, "weight_decay": 0.1, "maximize": True}),
    ("adagrad", optim.Adagrad, {}),
    ("adagrad-decay-maximize", optim.Adagrad, {"weight_decay": 0.1, "maximize": True}),
    ("rmsprop", optim.RMSprop, {}),
    ("rmsprop-momentum", optim.RMSprop, {"momentum": 0.9}),
    ("rmsprop-centered", optim.RMSprop, {"centered": True}),
    ("rmsprop-momentum-centered", optim.RMSprop, {"momentum": 0.9, "centered": True}),
    ("rmsprop-decay-maximize", optim.RMSprop, {"weight_decay": 0.1, "maximize": True}),
    ("adam", optim.Adam, {}),
    ("adam-amsgrad", optim.Adam, {"amsgrad": True}),
    ("adam-decay", optim.Adam, {"weight_decay": 0.1}),
    ("adam-decay-decoupled", optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("adam-amsgrad-maximize", optim.Adam, {"amsgrad": True, "maximize": True}),
    ("adamw", optim.AdamW, {}),
    ("adamw-amsgrad", optim.AdamW, {"amsgrad": True}),
    ("adamw-nodecay", optim.AdamW, {"weight_decay": 0}),
    ("adamw-amsgrad-nodecay-maximize", optim.AdamW,
     {"amsgrad": True, "weight_decay": 0, "maximize": True}),
    ("adamax", optim.Adamax, {}),
    ("adamax-decay-maximize", optim.Adamax, {"weight_decay": 0.1, "maximize": True}),
    ("nadam", optim.NAdam, {}),
    ("nadam-decay", optim.NAdam, {"weight_decay": 0.1}),
    ("nadam-decay-decoupled-maximize", optim.NAdam,
     {"weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True}),
    ("radam", optim.RAdam, {}),
    ("radam-decay-maximize", optim.RAdam, {"weight_decay": 0.1, "maximize": True}),
    ("radam-decay-decoupled", optim.RAdam,
     {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("adadelta", optim.Adadelta, {}),
    ("adadelta-decay-maximize", optim.Adadelta, {"weight_decay": 0.1, "maximize": True}),
    ("rprop", optim.Rprop, {}),
    ("asgd", optim.ASGD, {}),
    ("asgd-decay-maximize", optim.ASGD, {"weight_decay": 0.1, "maximize": True}),
    ("muon", optim.Muon, {}),
    ("muon-nonesterov", optim.Muon, {"nesterov": False}),
    ("adafactor", optim.Adafactor, {}),
    ("adafactor-decay-maximize", optim.Adafactor, {"weight_decay": 0.1, "maximize": True}),
    ("transformers-adafactor", Adafactor, {}),
    ("transformers-adafactor-momentum", Adafactor, {"beta1": 0.9}),
    ("transformers-adafactor-decay", Adafactor, {"weight_decay": 0.1}),
    ("lbfgs-3", optim.LBFGS,
     {"history_size": 3, "max_iter": 8, "tolerance_change": 0, "tolerance_grad": 0}),
)  # fmt: skip
"""(name, class, arguments)"""
