"""Equal graphs have equal fingerprints, and whatever matters to a plan changes them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Atom, Factor, Graph, Node, Phase, Ref, Role, TensorType


def graph() -> Graph:
    tensor = TensorType("float32", (4,), ((0,),))
    placeholder = Node(
        0, "primals_1", "placeholder", Role.INPUT, Phase.FORWARD, outputs=(tensor,), target="0"
    )
    op = Node(
        1,
        "mul",
        "aten.mul.Tensor",
        Role.OP,
        Phase.FORWARD,
        args=(Ref(0), 2),
        kwargs=(("alpha", 1),),
        inputs=(Ref(0),),
        outputs=(tensor,),
        key=":forward:mul.0",
        factors=(Factor("d0", 0, ((0, 0),), ((0, 0),)),),
    )
    return Graph("model", (placeholder, op), (Atom(4, "batch", in_param=False),))


def with_op(**changes: object) -> Graph:
    found = graph()
    return replace(found, nodes=(found.nodes[0], replace(found.nodes[1], **changes)))  # pyright: ignore[reportArgumentType]


def test_fingerprint_is_stable() -> None:
    assert fingerprint(graph()) == fingerprint(graph()) == GOLDEN


GOLDEN = "8db8d943335e6a53b5dbe070fe89c7aa"


@pytest.mark.parametrize(
    "same",
    [
        replace(graph(), name="other"),
        with_op(name="mul_7"),
        with_op(source_line="model.py:3"),
        replace(graph(), atoms=(Atom(4, "rows", in_param=False),)),
    ],
)
def test_names_do_not_count(same: Graph) -> None:
    assert fingerprint(same) == fingerprint(graph())


@pytest.mark.parametrize(
    "other",
    [
        with_op(op="aten.add.Tensor"),
        with_op(args=(Ref(0), 2.0)),
        with_op(args=(Ref(0), (2,))),
        with_op(kwargs=(("alpha", 2),)),
        with_op(key=":forward:mul.1"),
        with_op(phase=Phase.BACKWARD),
        with_op(outputs=(TensorType("float64", (4,), ((0,),)),)),
        with_op(factors=()),
        with_op(partial=((0,),)),
        with_op(view=True),
        replace(graph(), atoms=(Atom(4, "batch", in_param=True),)),
        replace(graph(), atoms=(Atom(8, "batch", in_param=False),)),
    ],
)
def test_what_a_plan_rests_on_counts(other: Graph) -> None:
    assert fingerprint(other) != fingerprint(graph())
