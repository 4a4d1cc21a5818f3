"""Layers of torch that other libraries' models rarely have: recurrent, sparse, of other ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH, SEQ, WIDTH, VOCAB, CLASSES = 4, 8, 16, 32, 6


class Tagger(nn.Module):
    """A recurrent layer over embeddings, a class per position."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, batch_first=True, **options)
        directions = 2 if options.get("bidirectional") else 1
        self.head = nn.Linear(options.get("proj_size", WIDTH) * directions, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embed(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def _tagger(kind: type[nn.RNNBase], seq: int = SEQ, **options: Any) -> Any:
    def build() -> Any:
        ids, labels = torch.randint(VOCAB, (BATCH, seq)), torch.randint(CLASSES, (BATCH, seq))
        return Tagger(kind, **options), {"ids": ids, "labels": labels}

    return build


class Cells(nn.Module):
    """A loop over cells, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = x.new_zeros(x.shape[0], WIDTH)
        found: list[Tensor] = []
        for step in x.unbind(1):
            h, c = self.first(step, (h, c))
            g = self.second(h, g)
            found.append(self.head(g))
        return torch.stack(found, 1)


class Translator(nn.Module):
    """nn.Transformer with embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.Transformer(WIDTH, 4, 2, 2, 32, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.layers(
            self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True
        )
        return F.cross_entropy(self.head(hidden).flatten(0, 1), target.flatten())


class Padded(nn.Module):
    """nn.TransformerEncoder with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=padding).mean()


class Bag(nn.Module):
    """Words as a bag, a linear layer over it."""

    def __init__(self, mode: str, *, sparse: bool = False) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(VOCAB, WIDTH, mode=mode, sparse=sparse)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor, offsets: Tensor | None = None) -> Tensor:
        return self.head(self.bag(words, offsets))


class Sparse(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, sparse=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).mean(1))


def _translator() -> Any:
    ids = torch.randint(VOCAB, (2, BATCH, SEQ))
    return Translator(), {"source": ids[0], "target": ids[1]}


def _padded() -> Any:
    padding = torch.arange(SEQ) >= torch.tensor([[8], [5], [7], [3]])
    return Padded(), {"x": torch.randn(BATCH, SEQ, WIDTH), "padding": padding}


def _bag(mode: str, *, offsets: bool = False, sparse: bool = False) -> Any:
    def build() -> Any:
        model = Bag(mode, sparse=sparse)
        if offsets:
            words = torch.randint(VOCAB, (BATCH * SEQ,))
            return model, {"words": words, "offsets": torch.tensor([0, 5, 12, 20])}
        return model, {"words": torch.randint(VOCAB, (BATCH, SEQ))}

    return build


def _sparse() -> Any:
    return Sparse(), {"ids": torch.randint(VOCAB, (BATCH, SEQ))}


def _conv1d() -> Any:
    model = nn.Sequential(
        nn.Conv1d(8, 16, 3, padding=1),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(16, 16, 5, dilation=2, groups=4),
        nn.GELU(),
        nn.ConvTranspose1d(16, 8, 4, stride=2),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return model, (torch.randn(BATCH, 8, 32),)


def _conv3d() -> Any:
    model = nn.Sequential(
        nn.Conv3d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm3d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1),
        nn.InstanceNorm3d(16),
        nn.AvgPool3d(2),
        nn.ConvTranspose3d(16, 8, 2, stride=2),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
    )
    return model, (torch.randn(BATCH, 3, 8, 8, 8),)


def _distinct() -> Any:
    """A deep stack of layers of which no two are alike."""
    widths = [16 + k for k in range(60)]
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths)]
    return nn.Sequential(*layers), (torch.randn(BATCH, 16),)


MODELS = {
    "LSTM": _tagger(nn.LSTM),
    "LSTM, 2 layers, both directions": _tagger(nn.LSTM, num_layers=2, bidirectional=True),
    "LSTM with projections": _tagger(nn.LSTM, proj_size=8),
    "LSTM of 64 steps": _tagger(nn.LSTM, seq=64),
    "GRU": _tagger(nn.GRU),
    "GRU, 2 layers with dropout": _tagger(nn.GRU, num_layers=2, dropout=0.1),
    "RNN": _tagger(nn.RNN),
    "LSTMCell and GRUCell": lambda: (Cells(), (torch.randn(BATCH, SEQ, WIDTH),)),
    "Transformer": _translator,
    "TransformerEncoder, padded": _padded,
    "EmbeddingBag (sum)": _bag("sum"),
    "EmbeddingBag (mean, offsets)": _bag("mean", offsets=True),
    "EmbeddingBag (max)": _bag("max"),
    "EmbeddingBag (sparse)": _bag("mean", sparse=True),
    "Embedding (sparse)": _sparse,
    "Conv1d net": _conv1d,
    "Conv3d net": _conv3d,
    "60 distinct Linears": _distinct,
}
