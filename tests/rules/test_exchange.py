"""Ops whose ranks talk to one another: what they compute together is what the op computes whole,
and they send what `autopar.exchange` says, no more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.codegen import bind
from autopar.codegen.ops.peers import Peers
from autopar.codegen.ops.table import EMITTERS, emit
from autopar.ir.choices import Choice, choices, joint_axes, shardings
from autopar.ir.graph import Atom, Factor, Graph, Node, Phase, Ref, Role, Slot, TensorType
from autopar.ir.mesh import Mesh
from autopar.ir.redistribute import local_shape
from autopar.rules.experts import BACKWARD, FORWARD
from autopar.rules.notation import Call, Dims, Rule, TensorShape
from autopar.rules.op import Shapes
from autopar.rules.table import OPS
from autopar.rules.work import exchange_axes, exchanges, scratch_bytes
from autopar.runtime.ops import ragged_all_to_all
from autopar.runtime.program.lean import LeanGraph
from autopar.runtime.program.program import Program
from autopar.runtime.program.symbols import permute
from autopar.runtime.simulator.interpreter import c10d, run
from autopar.runtime.simulator.shards import shard, unshard
from autopar.tracer.atoms import joint_factor
from tests.live_bytes import META, PhaseRun
from tests.planned import on_h100
from tests.rules.execution import assert_equal, call_op, letter_sizes, resolve, snapshot, substitute
from tests.rules.samples import SAMPLES
from tests.rules.test_oracle import made, ruled

EXCHANGING = sorted(op for op in EMITTERS if " " not in op)
MESHES = ["2", "3", "2x2"]
CASES = [
    pytest.param(op, index, mesh, id=f"{op}-{index}-{mesh}")
    for op in EXCHANGING
    for index in range(len(SAMPLES[op]))
    for mesh in (*MESHES, *(["4"] if "sdpa" in op else []))
]


def test_every_op_with_an_exchanged_letter_has_an_emitter() -> None:
    found: set[str] = set()
    for op in OPS:
        for index in range(len(SAMPLES[op])):
            call, _ = snapshot(op, *made(op, index))
            rule = ruled(call)
            found |= {op} if rule.exchanged else set()
            found |= {f"{op} {name}" for name, _ in rule.joint}
            assert {name for name, _ in rule.joint} <= set(OPS[op].joint)
    assert found == set(EMITTERS)


def slot_of(dims: Dims, letter: str) -> Slot | None:
    return next(((d, dim.index(letter)) for d, dim in enumerate(dims) if letter in dim), None)


def one_op(call: Call, rule: Rule) -> tuple[Graph, Node]:
    """A graph of placeholders and the op, with an atom per letter."""
    sizes = letter_sizes(rule, call)
    number = {letter: k for k, letter in enumerate(rule.letters)}
    atoms = tuple(Atom(sizes[a], a, in_param=False) for a in number)

    def typed(tensor: TensorShape, dims: Dims) -> TensorType:
        return TensorType(
            tensor.dtype, tensor.shape, tuple(tuple(number[a] for a in dim) for dim in dims)
        )

    held = tuple(
        Node(k, f"x{k}", "placeholder", Role.INPUT, Phase.FORWARD, outputs=(typed(t, dims),))
        for k, (t, dims) in enumerate(zip(call.inputs, rule.inputs, strict=True))
    )
    factors = tuple(
        Factor(
            letter,
            atom,
            tuple(slot_of(dims, letter) for dims in rule.inputs),
            tuple(slot_of(dims, letter) for dims in rule.outputs),
            rule.type_of(letter),
            letter in rule.positional,
        )
        for letter, atom in number.items()
    )
    named = {factor.name: factor for factor in factors}
    joint = (joint_factor(name, [named[a] for a in members]) for name, members in rule.joint)
    node = Node(
        len(held), "op", call.op, Role.OP, Phase.FORWARD, call.args, call.kwargs,
        inputs=tuple(Ref(k) for k in range(len(held))),
        outputs=tuple(typed(t, dims) for t, dims in zip(call.outputs, rule.outputs, strict=True)),
        factors=(*factors, *joint),
    )  # fmt: skip
    return Graph("one op", (*held, node), atoms), node


def exchanging(graph: Graph, node: Node, mesh: Mesh) -> Iterator[Choice]:
    for choice in choices(node, graph.atoms, mesh.sizes):
        if exchange_axes(node, choice):
            yield choice


@pytest.mark.parametrize(("op", "index", "name"), CASES)
def test_ranks_compute_together_what_the_op_computes_whole(op: str, index: int, name: str) -> None:
    args, kwargs = made(op, index)
    call, inputs = snapshot(op, args, kwargs)
    expected = [x for x in call_op(resolve(op), args, kwargs) if x.numel()]
    graph, node = one_op(call, ruled(call))
    mesh = on_h100(name)[1]
    for choice in exchanging(graph, node, mesh):
        got, _ = computed(graph, node, choice, mesh, args, kwargs, inputs)
        assert_equal(got, expected, f"{op} under {choice}")


def emitted(
    graph: Graph,
    node: Node,
    choice: Choice,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[Tensor],
) -> tuple[fx.Graph, list[fx.Node], list[TensorType]]:
    """The op's nodes on a rank, its outputs among them, and the types of its inputs."""
    asked, left = shardings(node, choice)
    types = graph.input_types(node)
    shapes = Shapes(
        tuple(t.shape for t in types),
        tuple(t.shape for t in node.outputs),
        tuple(
            local_shape(t, graph.atoms, s, mesh.sizes) for t, s in zip(types, asked, strict=True)
        ),
        tuple(
            local_shape(t, graph.atoms, s, mesh.sizes)
            for t, s in zip(node.outputs, left, strict=True)
        ),
    )
    written = LeanGraph()
    given: list[Any] = [written.placeholder(f"x{k}") for k in range(len(inputs))]
    new_args, new_kwargs = substitute(args, kwargs, given)
    dtype = inputs[0].dtype
    sent = exchanges(graph, node, choice, mesh.sizes)
    peers = Peers(
        written, node, choice, mesh, graph.atoms, shapes, dtype, sent, new_args, new_kwargs
    )
    return written, emit(peers), list(types)


def computed(
    graph: Graph,
    node: Node,
    choice: Choice,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: list[Tensor],
) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    """The op's outputs, put together from all ranks, and (kind, axis, bytes) of what it sends."""
    written, outputs, types = emitted(graph, node, choice, mesh, args, kwargs, inputs)
    asked, left = shardings(node, choice)
    sending = [n for n in written.nodes if n.target in (c10d.all_reduce.default, permute)]
    written.output((*outputs, *sending))
    pieces = [
        [
            shard(x, t, graph.atoms, s, mesh, mesh.coordinate(rank))
            for x, t, s in zip(inputs, types, asked, strict=True)
        ]
        for rank in range(mesh.num_devices)
    ]
    results = run(fx.GraphModule({}, written), mesh, pieces)
    wanted = [k for k, t in enumerate(node.outputs) if prod(t.shape) or t.shape == ()]
    whole = [
        unshard([r[k] for r in results], node.outputs[o], graph.atoms, left[o], mesh)
        for k, o in enumerate(wanted)
    ]
    seen = [
        ("permute" if n.target is permute else n.args[1], n.args[-1], x.nbytes)
        for n, x in zip(sending, results[0][len(outputs) :], strict=True)
    ]
    return whole, seen


@pytest.mark.parametrize("op", EXCHANGING)
def test_what_is_sent_is_what_is_priced(op: str) -> None:
    args, kwargs = made(op, len(SAMPLES[op]) - 1)
    call, inputs = snapshot(op, args, kwargs)
    graph, node = one_op(call, ruled(call))
    mesh = on_h100("2x2")[1]
    for choice in exchanging(graph, node, mesh):
        if node.op in (FORWARD, BACKWARD) and joint_axes(node, choice):
            continue
        _, sent = computed(graph, node, choice, mesh, args, kwargs, inputs)
        listed = exchanges(graph, node, choice, mesh.sizes)
        assert sent == [
            (each.reduce or each.kind, mesh.names[each.axis], each.in_bytes) for each in listed
        ]


@pytest.mark.parametrize(("op", "index"), [(op, k) for op in (FORWARD, BACKWARD) for k in range(3)])
def test_messages_are_as_large_as_priced(
    op: str, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a rank sends is, up to what comes back, the same for any routing; over all ranks all
    of it is."""
    heard: list[list[int]] = []
    exchanged = ragged_all_to_all.exchanged

    def listen(messages: Sequence[ragged_all_to_all.RaggedMessage]) -> list[Tensor]:
        heard.append([message.rows.nbytes for message in messages])
        return exchanged(messages)

    monkeypatch.setattr(ragged_all_to_all, "exchanged", listen)
    args, kwargs = made(op, index)
    call, inputs = snapshot(op, args, kwargs)
    graph, node = one_op(call, ruled(call))
    mesh = on_h100("2x2")[1]
    tried = 0
    for choice in exchanging(graph, node, mesh):
        if joint_axes(node, choice):
            heard.clear()
            computed(graph, node, choice, mesh, args, kwargs, inputs)
            listed = exchanges(graph, node, choice, mesh.sizes)
            assert {each.kind for each in listed} == {"all_to_all"}
            # One entry per group of ranks whose inputs differ, one after the other.
            groups = len(heard) // len(listed)
            for k, each in enumerate(listed):
                sent = [n for group in heard[k :: len(listed)] for n in group]
                assert sum(sent) == groups * mesh.sizes[each.axis] * each.in_bytes
                assert each.in_bytes == each.out_bytes
                assert k == 2 or set(sent) == {each.in_bytes}
            tried += 1
    assert tried == 6


def _rows(dtype: torch.dtype) -> dict[str, tuple[Any, ...]]:
    """Arguments of ops that reduce rows, with rows that are long enough for what there is one of
    per row not to count."""

    def x(*shape: int) -> Tensor:
        return torch.ones(shape, dtype=dtype)

    rows, width = 16, 4096
    wide, row, stat = x(rows, width), x(width), x(rows, 1)
    return {
        "aten._log_softmax.default": (wide, 1, False),
        "aten._softmax.default": (wide, 1, False),
        "aten.logsumexp.default": (wide, [1], False),
        "aten._log_softmax_backward_data.default": (wide, x(rows, width), 1, dtype),
        "aten._softmax_backward_data.default": (wide, x(rows, width), 1, dtype),
        "aten.native_layer_norm.default": (wide, [width], row, x(width), 1e-5),
        "aten._fused_rms_norm.default": (wide, [width], row, 1e-5),
        "aten.native_layer_norm_backward.default": (
            wide, x(rows, width), [width], stat, x(rows, 1), row, x(width), [True] * 3,
        ),
        "aten._fused_rms_norm_backward.default": (
            wide, x(rows, width), [width], stat, row, [True] * 2,
        ),
        "aten.embedding.default": (x(64, width), torch.arange(rows)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", _rows(torch.float32))
def test_what_is_held_on_the_way_is_counted(op: str, dtype: torch.dtype) -> None:
    """Against the storages that the op's nodes have at a time on one rank."""
    call, inputs = snapshot(op, _rows(dtype)[op], {})
    graph, node = one_op(call, ruled(call))
    mesh = on_h100("2")[1]
    for choice in exchanging(graph, node, mesh):
        asked, _ = shardings(node, choice)
        given = [
            torch.empty(local_shape(t, graph.atoms, s, mesh.sizes), dtype=x.dtype, device=META)
            for x, t, s in zip(inputs, graph.input_types(node), asked, strict=True)
        ]
        outputs, ran = on_meta(graph, node, choice, mesh, _rows(dtype)[op], inputs, given)
        counted = scratch_bytes(graph, node, choice, mesh.sizes)
        held = ran.peak - sum(x.untyped_storage().nbytes() for x in outputs)
        # Gradients of weights are made last.
        later = sum(x.untyped_storage().nbytes() for x in outputs[1:])
        assert held <= counted <= held + later + 10 * 16 * 8


def on_meta(
    graph: Graph,
    node: Node,
    choice: Choice,
    mesh: Mesh,
    args: tuple[Any, ...],
    inputs: list[Tensor],
    given: list[Tensor],
) -> tuple[list[Tensor], PhaseRun]:
    """The op on rank 0, with the tensors `given`."""
    written, outputs, _ = emitted(graph, node, choice, mesh, args, {}, inputs)
    written.output(tuple(outputs))
    gm = fx.GraphModule({}, written)
    rank = bind(Program(gm, None, (), ()), {n: n for n in mesh.names}, mesh, (0,), META)
    ran = PhaseRun(rank.forward, given)
    return ran.run(*given), ran
