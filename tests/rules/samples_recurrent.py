"""Arguments to prove the rules of recurrent layers with."""

from __future__ import annotations

from tests.rules.making import F
from tests.rules.sampling import sample

# 3 steps of several rows, in 1 or 2 directions
for kind, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
    for batch, directions, biases in ((4, 1, 2), (1, 2, 0), (6, 2, 2)):
        weights = [F(gates * 5, 6), F(gates * 5, 5), *[F(gates * 5)] * biases] * directions
        x, h = F(3, batch, 6), F(directions, batch, 5)
        c = h if kind == "lstm" else F(0)
        layer = (x, h, c, weights, bool(biases))
        sample("autopar.recurrent.default", kind, *layer)
        grad_y = F(3, batch, 5 * directions)
        sample("autopar.recurrent_backward.default", kind, grad_y, h, c, *layer)
# an LSTM with projections
_WEIGHTS = [F(20, 6), F(20, 2), F(20), F(20), F(2, 5)]
_LAYER = (F(3, 4, 6), F(1, 4, 2), F(1, 4, 5), _WEIGHTS, True)
sample("autopar.recurrent.default", "lstm", *_LAYER)
sample("autopar.recurrent_backward.default", "lstm", F(3, 4, 2), F(1, 4, 2), F(1, 4, 5), *_LAYER)
