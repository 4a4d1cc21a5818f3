"""The torch-free twin of a normalized joint FX graph: one `graph.Node` per FX node but the output,
then one per item of the output."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import TraceError
from autopar.ir.graph import Arg, Graph, Node, Phase, Ref, Role, TensorType
from autopar.rules.notation import Call, TensorShape
from autopar.runtime.program.random import is_random
from autopar.tracer import torch_private
from autopar.tracer.capture import Capture
from autopar.tracer.failures import layout_error
from autopar.tracer.fx_graphs import MODULE_KEY, outputs_of
from autopar.tracer.wrappers import CHECKPOINT_KEY

_BACKWARD_TAG = "is_backward"
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclass(frozen=True)
class _Item:
    """An item of the output: the node that makes it, its role and target."""

    source: fx.Node
    role: Role
    target: str


def snapshot(capture: Capture, name: str) -> Graph:
    """`capture.gm` as a Graph without atoms, factors or keys: every dim has no parts yet."""
    gm = capture.gm
    items = [_item(capture, item, desc) for item, desc in zip(*outputs_of(gm), strict=True)]
    fx_nodes = [node for node in gm.graph.nodes if node.op != "output"]
    phases = _phases(fx_nodes, items)
    modules = _modules(fx_nodes)
    nodes: list[Node] = []
    index = {node: i for i, node in enumerate(fx_nodes)}
    for i, node in enumerate(fx_nodes):
        for tensor in _tensors(node.meta.get("val")):
            if tensor.layout != torch.strided:
                raise layout_error(_op_name(node), tensor, modules[node], _source_line(node))
        role, target = _role(capture, node)
        args, kwargs = _arguments(node, index)
        nodes.append(
            Node(
                index=i,
                name=node.name,
                op=_op_name(node),
                role=role,
                phase=phases[node],
                args=args,
                kwargs=kwargs,
                inputs=tuple(_refs((args, tuple(v for _, v in kwargs)))),
                outputs=tuple(map(_type, _tensors(node.meta.get("val")))),
                module=modules[node],
                target=target,
                source_line=_source_line(node),
                random=is_random(node),
                checkpoint=node.meta.get("custom", {}).get(CHECKPOINT_KEY, ""),
                external=role is Role.PARAM and target in capture.external,
            )
        )
    for item in items:
        ref = Ref(index[item.source])
        nodes.append(
            Node(
                index=len(nodes),
                name=f"{item.role.value}_{item.target}",
                op="output",
                role=item.role,
                phase=Phase.BACKWARD if item.role is Role.GRAD else Phase.FORWARD,
                args=(ref,),
                inputs=(ref,),
                module=modules[item.source],
                target=item.target,
            )
        )
    return Graph(name, tuple(nodes), ())


def call_of(node: fx.Node) -> Call:
    """The call of an op, not an item of a tuple, as rules see it."""
    given: list[fx.Node] = []

    def ref(source: fx.Node) -> Ref:
        given.append(source)
        return Ref(len(given) - 1)

    args = tuple(_argument(a, ref) for a in node.args)
    kwargs = tuple((k, _argument(v, ref)) for k, v in node.kwargs.items())
    inputs = tuple(_shape(source.meta["val"]) for source in given)
    outputs = tuple(map(_shape, _tensors(node.meta["val"])))
    return Call(_op_name(node), args, kwargs, inputs, outputs)


def _shape(tensor: torch.Tensor) -> TensorShape:
    kind = _type(tensor)
    return TensorShape(kind.shape, kind.dtype)


def _role(capture: Capture, node: fx.Node) -> tuple[Role, str]:
    """(role, target) of a node that is no output."""
    if node.op == "call_function":
        return Role.OP, ""
    if node.op == "get_attr":
        return Role.CONSTANT, str(node.target)
    desc = node.meta["desc"]
    if isinstance(desc, torch_private.ParamAOTInput):
        return Role.PARAM, node.meta["target"]
    if isinstance(desc, torch_private.BufferAOTInput):
        target = node.meta["target"]
        return Role.PARAM if target in capture.external else Role.BUFFER, target
    if isinstance(desc, torch_private.PlainAOTInput):
        return Role.INPUT, str(capture.tensor_inputs[desc.idx])
    if isinstance(desc, torch_private.TangentAOTInput) and isinstance(
        desc.output, torch_private.PlainAOTOutput
    ):
        return Role.TANGENT, str(capture.tensor_outputs[desc.output.idx])
    raise TraceError(f"the captured graph has an input autopar does not know: {desc!r}")


def _item(capture: Capture, source: fx.Node, desc: Any) -> _Item:
    if isinstance(desc, torch_private.PlainAOTOutput):
        position = capture.tensor_outputs[desc.idx]
        role = capture.outputs[position].role
        assert role is not None
        return _Item(source, role, str(position))
    if isinstance(desc, torch_private.GradAOTOutput):
        return _Item(source, Role.GRAD, capture.name_of(desc.grad_of))
    changed, name = desc.mutated_input, capture.name_of(desc.mutated_input)
    is_param = isinstance(changed, torch_private.ParamAOTInput) or name in capture.external
    return _Item(source, Role.UPDATE if is_param else Role.MUTATION, name)


def _op_name(node: fx.Node) -> str:
    if node.op != "call_function":
        return node.op
    return "getitem" if node.target is operator.getitem else str(node.target)


def _arguments(
    node: fx.Node, index: Mapping[fx.Node, int]
) -> tuple[tuple[Arg, ...], tuple[tuple[str, Arg], ...]]:
    """`args` and `kwargs` as `graph.Arg`. A getitem of a tuple reads that output."""
    if node.op != "call_function":
        return (), ()
    if node.target is operator.getitem:
        source, position = node.args
        assert isinstance(source, fx.Node) and isinstance(position, int)
        return (Ref(index[source], _compact(source.meta["val"], position)), position), ()

    def ref(source: fx.Node) -> Ref:
        return Ref(index[source])

    args = tuple(_argument(a, ref) for a in node.args)
    return args, tuple((k, _argument(v, ref)) for k, v in node.kwargs.items())


def _argument(value: Any, ref: Callable[[fx.Node], Ref]) -> Arg:
    if isinstance(value, fx.Node):
        return ref(value)
    if isinstance(value, list | tuple):
        return tuple(_argument(v, ref) for v in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")


def _compact(values: Sequence[Any], position: int) -> int:
    """Which of the tensors among `values` is at `position`; an output may be None."""
    return sum(isinstance(v, torch.Tensor) for v in values[:position])


def _refs(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _refs(item)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def _type(tensor: torch.Tensor) -> TensorType:
    shape = tuple(int(size) for size in tensor.shape)
    return TensorType(str(tensor.dtype).removeprefix("torch."), shape, ((),) * len(shape))


def _phases(nodes: Sequence[fx.Node], items: Sequence[_Item]) -> dict[fx.Node, Phase]:
    """The phases of nodes. Nodes that autograd made, and those that depend on them, are backward;
    but all that a forward output depends on is forward."""
    phases: dict[fx.Node, Phase] = {}
    for node in nodes:
        after = any(phases[i] is Phase.BACKWARD for i in node.all_input_nodes)
        tagged = node.meta.get("partitioner_tag") == _BACKWARD_TAG
        phases[node] = Phase.BACKWARD if after or tagged else Phase.FORWARD
    pending = [item.source for item in items if item.role is not Role.GRAD]
    while pending:
        node = pending.pop()
        if phases[node] is Phase.BACKWARD:
            phases[node] = Phase.FORWARD
            pending += node.all_input_nodes
    return phases


def _modules(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """The path of each node's module. Nodes that autograd made to add gradients have no label: they
    belong to the module of their last input. Placeholders of parameters and buffers belong to the
    module that holds them."""
    order = {node: i for i, node in enumerate(nodes)}
    modules: dict[fx.Node, str] = {}
    for node in nodes:
        label = node.meta.get("custom", {}).get(MODULE_KEY)
        sources = [i for i in node.all_input_nodes if i.op == "call_function"]
        if "target" in node.meta:
            modules[node] = node.meta["target"].rpartition(".")[0]
        elif label is not None and not node.meta.get("is_gradient_acc"):
            modules[node] = label
        else:
            modules[node] = modules[max(sources, key=order.__getitem__)] if sources else ""
    return modules


def _source_line(node: fx.Node) -> str:
    """ "file:line" of the innermost frame of the node's stack trace, where there is one."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return ":".join(frames[-1]) if frames else ""
