"""A model of transformers from its class and configuration, small."""

from __future__ import annotations

from typing import Any

import torch
import transformers

BATCH, SEQ, VOCAB, WIDTH, CLASSES = 4, 16, 64, 32, 8


def model(name: str, **options: Any) -> Any:
    """A model of class `name`, whose configuration takes `options`."""
    kind = getattr(transformers, name)
    return kind(kind.config_class(**options))


def ids(seq: int = SEQ) -> torch.Tensor:
    """Tokens, none of them special."""
    return torch.randint(8, VOCAB, (BATCH, seq))


def padding(seq: int = SEQ) -> torch.Tensor:
    """A mask in which the last rows end early."""
    lengths = torch.tensor([seq, seq, seq - 3, seq - 5])
    return (torch.arange(seq) < lengths[:, None]).long()


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)
