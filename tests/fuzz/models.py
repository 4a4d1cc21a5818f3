"""The strategy: models drawn op by op, with what they return."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume
from hypothesis import strategies as st

from autopar.runtime.simulator.eager_step import seeded
from tests.fuzz import ops_layers, ops_math, ops_shape, ops_state
from tests.fuzz.drawing import SIZES, Draw, Drawing
from tests.fuzz.drawn import On
from tests.fuzz.programs import Program

MAX_OPS = 12
FAMILIES = (ops_math.OPS, ops_math.OPS, ops_shape.OPS, ops_layers.OPS, ops_state.OPS)


@st.composite
def programs(draw: Draw) -> Program:
    """A model of up to `MAX_OPS` draws, each of one op or a few, on values of few sizes."""
    count = draw(st.integers(0, MAX_OPS))
    # hypothesis begins with the simplest of all examples, which proves nothing.
    assume(count)
    palette = draw(st.lists(st.sampled_from(SIZES), min_size=2, max_size=4, unique=True))
    with seeded(0):
        d = Drawing(draw, palette)
        d.source(*(d.size() for _ in range(d.number(2, 4))))
        for _ in range(count):
            d.pick(d.pick(FAMILIES))(d)
        program = d.program(returned(d))
        return replace(program, through_all=d.chance(30))


def returned(d: Drawing) -> str:
    """What the model returns: one loss, several, a loss beside other values, or values alone.
    Every value that is not returned is part of a loss."""
    loose = d.unused()[:6]
    how = d.number(0, 4)
    if how == 4:
        kept = [name for name in loose if d[name].dim()][:3]
        rest = [name for name in loose if name not in kept]
        if kept and not rest:
            return f"{', '.join(kept)}," if len(kept) > 1 or d.chance(30) else kept[0]
    terms = [reduced(d, name) for name in loose] or [f"{d.value()}.sum()"]
    if how == 1:
        half = len(terms) // 2
        first, second = terms[:half] or [f"{d.value()}.mean()"], terms[half:]
        return f"({' + '.join(first)}, {' + '.join(second)})"
    total = " + ".join(terms)
    if how == 0:
        return total
    shown = d.pick(d.names(lambda x: True))
    if how == 2:
        return f"{{'loss': {total}, 'shown': {shown}, 'more': ({d.value()}.detach(), 1.5, None)}}"
    return f"({total}, {shown}, [{d.value()}])"


def reduced(d: Drawing, name: str) -> str:
    """A scalar that every element of a value counts in, each differently."""
    how = d.number(0, 3)
    if d[name].dim() and how == 0:
        return f"({name} * {d.buffer(*d.shape(name))}).sum()"
    return (f"{name}.square().mean()", f"{name}.sum()", f"torch.tanh({name}).mean()")[how % 3]


MESHES = ((2,), (3,), (2, 2), (4,), (2, 3), (2, 2, 2))


@st.composite
def places(draw: Draw) -> list[On]:
    """Three meshes, each with a random plan, and sometimes one with the plan chosen; on some, ranks
    are handed rows of their own."""
    meshes = draw(st.lists(st.sampled_from(MESHES), min_size=3, max_size=3, unique=True))
    found = [On(sizes, draw(st.integers(0, 1000))) for sizes in meshes]
    if draw(st.integers(0, 5)) == 5:
        found.append(On(draw(st.sampled_from([(2,), (2, 2)]))))
    return [replace(on, local=draw(st.integers(0, 2)) == 2) for on in found]
