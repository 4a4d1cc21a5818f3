"""Arguments to prove the rules of losses in chunks with."""

from __future__ import annotations

from tests.rules.making import F, I
from tests.rules.sampling import sample

# 12 rows of 6 features, 12 classes, of which class 3 is ignored; chunks that are even, or not.
_X, _W, _TARGET, _SCORES, _ROWS = F(12, 6), F(12, 6), I(12, high=12), F(12, 12), F(12)
for chunks in (1, 2, 5):
    more = (3, chunks)
    sample("autopar.linear_nll.default", _X, _W, _TARGET, *more)
    sample("autopar.linear_nll_backward.default", _X, _W, _TARGET, _ROWS, F(), *more)
    sample("autopar.scores_nll.default", _SCORES, _TARGET, *more)
    sample("autopar.scores_nll_backward.default", _SCORES, _X, _W, _TARGET, _ROWS, F(), *more)
