"""What the table says of the ops that matter most, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.ir.graph import Arg, Ref
from autopar.rules.notation import Call, Rule, TensorShape, parse_rule
from autopar.rules.table import OPS, rule_for
from tests.rules.execution import snapshot
from tests.rules.samples import SAMPLES
from tests.rules.test_oracle import made

Shape = tuple[int, ...]


def call(op: str, args: tuple[Arg, ...], inputs: list[Shape], outputs: list[Shape]) -> Call:
    return Call(
        op,
        args,
        (),
        tuple(TensorShape(s) for s in inputs),
        tuple(TensorShape(s) for s in outputs),
    )


def rule(op: str, args: tuple[Arg, ...], inputs: list[Shape], outputs: list[Shape]) -> Rule:
    found = rule_for(call(op, args, inputs, outputs))
    assert found is not None
    return found


X, Y, Z = Ref(0), Ref(1), Ref(2)


@pytest.mark.parametrize(
    ("op", "args", "inputs", "outputs", "expected"),
    [
        ("aten.mm.default", (X, Y), [(4, 6), (6, 8)], [(4, 8)], "m k, k n -> m n"),
        (
            "aten.addmm.default",
            (X, Y, Z),
            [(8,), (4, 6), (6, 8)],
            [(4, 8)],
            "n, m k!, k! n -> m n",
        ),
        (
            "aten.embedding.default",
            (X, Y),
            [(9, 6), (2, 3)],
            [(2, 3, 6)],
            "v# h, d0 d1 -> d0 d1 h",
        ),
        (
            "aten.native_layer_norm.default",
            (X, (6,), Y, Z, 1e-5),
            [(2, 4, 6), (6,), (6,)],
            [(2, 4, 6), (2, 4, 1), (2, 4, 1)],
            "d0 d1 d2@, d2@, d2@ -> d0 d1 d2@, d0 d1 1, d0 d1 1",
        ),
        (
            "aten.nll_loss_forward.default",
            (X, Y, None, 2, -100),
            [(4, 9), (4,)],
            [(), ()],
            "d0 c#, d0 -> _, _",
        ),
        ("aten.add.Tensor", (X, Y), [(2, 4, 6), (1, 6)], [(2, 4, 6)], "d0 d1 d2, 1 d2 -> d0 d1 d2"),
        ("aten.sum.dim_IntList", (X, (0, 1)), [(2, 4, 6)], [(6,)], "d0 d1 d2 -> d2"),
        ("aten.amax.default", (X, (-1,), True), [(4, 6)], [(4, 1)], "d0 d1! -> d0 1"),
        ("aten.view.default", (X, (8, 6)), [(2, 4, 6)], [(8, 6)], "d0 d1 d2 -> (d0 d1) d2"),
        (
            "aten.view.default",
            (X, (2, 4, 3, 2)),
            [(8, 6)],
            [(2, 4, 3, 2)],
            "(d0 d1) (d2 d3) -> d0 d1 d2 d3",
        ),
        ("aten.view.default", (X, (6, 2)), [(4, 3)], [(6, 2)], "i0! i1! -> o0! o1!"),
        ("aten.expand.default", (X, (4, 6)), [(1, 6)], [(4, 6)], "1 d1 -> d0 d1"),
        ("aten.slice.Tensor", (X, 1, 6, 12), [(4, 12)], [(4, 6)], "d0 (t! h) -> d0 h"),
        ("aten.slice.Tensor", (X, 1, 1, 9), [(4, 9)], [(4, 8)], "d0 t! -> d0 p!"),
        (
            "aten.split.Tensor",
            (X, 4, 1),
            [(2, 12)],
            [(2, 4)] * 3,
            "d0 (t! h) -> d0 h, d0 h, d0 h",
        ),
        ("aten.cat.default", ((X, Y), -1), [(2, 3), (2, 3)], [(2, 6)], "d0 h, d0 h -> d0 (t! h)"),
        ("aten.select.int", (X, 1, 0), [(4, 6, 3)], [(4, 3)], "d0 d1! d2 -> d0 d2"),
        (
            "autopar.sdpa.default",
            (X, Y, Z, None, False, None),
            [(2, 8, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4)],
            [(2, 8, 6, 4), (2, 8, 6)],
            "b (kv g) s d!, b kv t! d!, b kv t! e! -> b (kv g) s e!, b (kv g) s",
        ),
        (
            "autopar.sdpa.default",
            (X, Y, Z, None, True, None),
            [(2, 2, 6, 4)] * 3,
            [(2, 2, 6, 4), (2, 2, 6)],
            "b h s# d!, b h t! d!, b h t! e! -> b h s# e!, b h s#",
        ),
    ],
)
def test_lines(
    op: str, args: tuple[Arg, ...], inputs: list[Shape], outputs: list[Shape], expected: str
) -> None:
    assert str(rule(op, args, inputs, outputs)) == expected


def test_sizes_are_those_of_grouped_letters() -> None:
    found = rule("aten.view.default", (X, (2, 4, 6)), [(8, 6)], [(2, 4, 6)])
    assert found.sizes == (("d0", 2), ("d1", 4))


def test_a_dim_of_size_1_has_no_letter() -> None:
    found = rule("aten.mm.default", (X, Y), [(1, 6), (6, 8)], [(1, 8)])
    assert str(found) == "1 k, k n -> 1 n"


@pytest.mark.parametrize(
    ("op", "other", "expected"),
    [
        ("aten.add.Tensor", Y, ((0, 1),)),
        ("aten.add.Tensor", 1e-5, ()),
        ("aten.add.Tensor", 0, ((0,),)),
        ("aten.mul.Tensor", Y, ((0,), (1,))),
        ("aten.mul.Tensor", 2.0, ((0,),)),
        ("aten.div.Tensor", Y, ((0,),)),
        ("aten.maximum.default", Y, ()),
    ],
)
def test_linear_passes_partial_and_affine_does_not(
    op: str, other: Arg, expected: tuple[tuple[int, ...], ...]
) -> None:
    inputs: list[Shape] = [(4, 6), (4, 6)] if isinstance(other, Ref) else [(4, 6)]
    assert rule(op, (X, other), inputs, [(4, 6)]).partial == expected


def test_a_cast_to_integers_is_not_linear() -> None:
    cast = Call(
        "aten._to_copy.default",
        (X,),
        (("dtype", "torch.int64"),),
        (TensorShape((4,), "float32"),),
        (TensorShape((4,), "int64"),),
    )
    found = rule_for(cast)
    assert found is not None and found.partial == ()


def test_mean_averages() -> None:
    assert rule("aten.mean.default", (X,), [(4, 6)], [()]).mean
    assert not rule("aten.sum.default", (X,), [(4, 6)], [()]).mean


def test_a_mean_over_counted_targets_is_refused() -> None:
    loss = call("aten.nll_loss_forward.default", (X, Y, None, 1, -100), [(4, 9), (4,)], [(), ()])
    assert rule_for(loss) is None


def test_an_unknown_op_has_no_rule() -> None:
    assert rule_for(call("aten.nothing_of_the_kind.default", (X,), [(4,)], [(4,)])) is None


def test_a_call_that_does_not_fit_its_line_has_no_rule() -> None:
    assert rule_for(call("aten.mm.default", (X, Y), [(4, 6), (5, 8)], [(4, 8)])) is None
    assert rule_for(call("aten.mm.default", (X, Y), [(4, 6)], [(4, 8)])) is None


def test_what_cuts_irregularly_is_no_view() -> None:
    assert rule("aten.slice.Tensor", (X, 0, 2, 4), [(6,)], [(2,)]).view
    assert not rule("aten.slice.Tensor", (X, 0, 1, 4), [(6,)], [(3,)]).view
    assert not rule("aten.view.default", (X, (6, 2)), [(4, 3)], [(6, 2)]).view


def test_copies_are_no_views() -> None:
    for op in ("aten.clone.default", "aten._to_copy.default"):
        assert not rule(op, (X,), [(4, 6)], [(4, 6)]).view


def test_unwanted_gradients_may_be_left_out_or_empty() -> None:
    args: tuple[Any, ...] = (X, Y, (6,), Ref(2), Ref(3), None, None, (True, False, False))
    inputs: list[Shape] = [(4, 6), (4, 6), (4, 1), (4, 1)]
    for outputs in ([(4, 6)], [(4, 6), (0,), (0,)], [(4, 6), (), ()]):
        found = rule("aten.native_layer_norm_backward.default", args, inputs, outputs)
        assert len(found.outputs) == len(outputs)
        assert found.outputs[0] == (("d0",), ("d1",))


def test_an_empty_dim_is_whole() -> None:
    assert rule("aten.neg.default", (X,), [(0, 6)], [(0, 6)]).whole == {"d0"}


@pytest.mark.parametrize("op", sorted(OPS))
def test_rules_print_and_parse_back(op: str) -> None:
    for index in range(len(SAMPLES[op])):
        args, kwargs = made(op, index)
        described, _ = snapshot(op, args, kwargs)
        found = rule_for(described)
        assert found is not None
        again = parse_rule(str(found))
        assert again == replace(found, partial=(), joint=(), mean=False, view=False, sizes=())
        assert len(found.inputs) == len(described.inputs)
        assert set(dict(found.sizes)) <= set(found.letters)
