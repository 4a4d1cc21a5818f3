"""What one rank's graphs hold while they run, counted storage by storage on meta tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed  # defines the ops of _c10d_functional
from torch import Tensor, fx

from autopar.codegen import bind
from autopar.ir.graph import Graph, Ref, Role
from autopar.ir.redistribute import local_shape
from autopar.plans.plan import Plan
from autopar.runtime.ops.host_copies import ARRIVED, LANDED, OFFLOAD
from autopar.runtime.program.backend import reduce_in_place
from autopar.runtime.program.program import Program, Sum
from autopar.tracer import Traced
from tests.layouts import laid_out, program_of

c10d = torch.ops._c10d_functional
META = torch.device("meta")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.bfloat16,
          torch.float16, torch.int64, torch.int32, torch.bool, torch.uint8)}  # fmt: skip


class PhaseRun(fx.Interpreter):
    """Runs a graph of rank 0. `peak` is the most bytes held at a time beside `given` tensors, which
    someone else holds; a collective's input is held until it has come. What lies `on_host` takes
    none. An allocator hands memory out in multiples of `granule` bytes."""

    def __init__(self, gm: fx.GraphModule, given: Sequence[Tensor], granule: int = 1) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.granule = granule
        self.given = {storage_of(x) for x in given}
        self.on_host: list[Tensor] = []
        self.sent: dict[fx.Node, Tensor] = {}
        self.peak, self.at = 0, ""

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            return super().run_node(n).to(META)
        result = self.waited(n) if n.target is c10d.wait_tensor.default else self.ran(n)
        if n.target is OFFLOAD:
            self.on_host.append(result)
            self.given.add(storage_of(result))
            self.sent[n] = self.env[n.all_input_nodes[0]]
        elif n.target in (ARRIVED, LANDED):
            self.sent.pop(n.all_input_nodes[0], None)
        live = {
            storage_of(x): rounded(x.untyped_storage().nbytes(), self.granule)
            for x in tensors_in((result, *self.env.values(), *self.sent.values()))
            if storage_of(x) not in self.given
        }
        total = sum(live.values())
        if total > self.peak and n.op != "output":
            self.peak, self.at = total, n.name
        return result

    def waited(self, n: fx.Node) -> Tensor:
        (source,) = n.all_input_nodes
        self.sent.pop(source, None)
        return self.env[source]

    def ran(self, n: fx.Node) -> Any:
        kind = str(n.target)
        if not kind.startswith("_c10d_functional."):
            return super().run_node(n)
        (source,) = n.all_input_nodes
        x = self.env[source]
        self.sent[n] = x
        assert x.is_contiguous(), n
        if "all_reduce_" in kind:
            return x
        shape = list(x.shape)
        if "all_gather" in kind:
            shape[0] *= n.args[1]
        elif "reduce_scatter" in kind:
            shape[0] //= n.args[2]
        return x.new_empty(shape)


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def rounded(num_bytes: int, granule: int) -> int:
    return -(-num_bytes // granule) * granule


def storage_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def measured(program: Program, graph: Graph, plan: Plan, granule: int = 1) -> tuple[int, int]:
    """The most bytes that forward and backward hold on rank 0, beside parameters, buffers, inputs
    and tangents; backward with what forward returned to the script. In microbatches, of the last
    turn and of those before, with all that is summed up."""
    parts = [part for part in (program.before, program) if part is not None]
    peaks = [_measured(part, graph, plan, program.sums, granule) for part in parts]
    forward, backward = (max(each) for each in zip(*peaks, strict=True))
    return forward, backward


def _measured(
    program: Program, graph: Graph, plan: Plan, sums: Sequence[Sum], granule: int
) -> tuple[int, int]:
    layout = laid_out(graph, plan.structure.only)
    mesh = plan.structure.only.mesh
    names = {name: name for name in mesh.names}
    bound = bind(program, names, mesh, (0,) * len(mesh.axes), META)
    given = _given(graph, layout)
    given["microbatch:"] = torch.empty((), device=META)
    made = {s.name: torch.empty(s.shape, dtype=DTYPES[s.dtype], device=META) for s in sums}
    given |= made
    kinds = {s.name: s.phase for s in sums}
    waiting = sum(
        rounded(made[name].nbytes, granule) for name, phase in kinds.items() if phase == "backward"
    )
    values = [given[name] for name in bound.forward_inputs]
    theirs = [x for n, x in given.items() if n not in made and n in bound.forward_inputs]
    forward = PhaseRun(reduce_in_place(bound.forward), theirs, granule)
    results: Mapping[str, Tensor] = dict(
        zip(bound.forward_outputs, forward.run(*values), strict=True)
    )
    if bound.backward is None:
        return forward.peak + waiting, 0
    inputs = [
        results[name] if name.startswith("saved:") else given[name]
        for name in bound.backward_inputs
    ]
    tangents = [x for name, x in given.items() if name.startswith("tangent:")]
    lent = [*theirs, *tangents, *forward.on_host]
    backward = PhaseRun(reduce_in_place(bound.backward), lent, granule)
    # What forward returned stays with the script.
    kept = {storage_of(x): x for n, x in results.items() if not n.startswith("saved:")}
    backward.sent |= {
        fx.Graph().placeholder("kept"): x
        for place, x in kept.items()
        if place not in backward.given
    }
    backward.run(*inputs)
    return forward.peak + waiting, backward.peak


def peak_bytes(traced: Traced, plan: Plan, granule: int = 1) -> int:
    """What rank 0 holds at the fullest moment of a step: what is there all the time, as a loop that
    accumulates has it, and what the graphs hold beside that while they run."""
    graph, memory = traced.graph, plan.estimates.memory
    layout = laid_out(graph, plan.structure.only)
    given = sum(
        rounded(layout.held_bytes(Ref(node.index), layout.output_state(Ref(node.index))), granule)
        for node in graph.with_role(Role.INPUT, Role.BUFFER)
    )
    program = program_of(traced, plan.structure.only, graph)
    steady = memory.params + memory.gradients + memory.optimizer
    return steady + given + max(measured(program, graph, plan, granule))


def _given(graph: Graph, layout: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for node in graph.with_role(Role.PARAM, Role.BUFFER, Role.INPUT, Role.TANGENT):
        tensor = node.outputs[0]
        shape = local_shape(
            tensor, graph.atoms, layout.output_state(Ref(node.index)), layout.mesh.sizes
        )
        found[f"{node.role.value}:{node.target}"] = torch.empty(
            shape, dtype=DTYPES[tensor.dtype], device=META
        )
    return found
