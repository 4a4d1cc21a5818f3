"""Graphs written by hand, for tests that need no torch: dims are atoms, named by letters."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.ir.graph import Atom, Factor, Graph, Node, Phase, Ref, Role, TensorType
from autopar.rules.notation import parse_rule


@dataclass
class Builder:
    """`sizes` gives every atom of the graph; `params` names those that parameters have."""

    sizes: dict[str, int]
    params: str = ""
    dtype: str = "float32"
    nodes: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.atoms = {name: i for i, name in enumerate(self.sizes)}

    def type(self, dims: str) -> TensorType:
        names = dims.split()
        return TensorType(
            self.dtype,
            tuple(self.sizes[name] for name in names),
            tuple((self.atoms[name],) for name in names),
        )

    def placeholder(self, role: Role, target: str, dims: str) -> Ref:
        phase = Phase.BACKWARD if role is Role.TANGENT else Phase.FORWARD
        index = len(self.nodes)
        self.nodes.append(
            Node(index, target, "placeholder", role, phase, outputs=(self.type(dims),),
                 key=f"{role.value}:{target}", target=target)
        )  # fmt: skip
        return Ref(index)

    def op(
        self,
        op: str,
        rule: str,
        inputs: tuple[Ref, ...],
        dims: str,
        *,
        key: str = "",
        phase: Phase = Phase.FORWARD,
        partial: tuple[tuple[int, ...], ...] = (),
        module: str = "",
    ) -> Ref:
        """An op of one output; each letter of `rule` stands for the atom found at its place."""
        parsed = parse_rule(rule)
        index = len(self.nodes)
        types = (*(self.nodes[r.node].outputs[r.output] for r in inputs), self.type(dims))
        tensors = (*parsed.inputs, *parsed.outputs)
        factors: list[Factor] = []
        for letter in parsed.letters:
            slots = tuple(
                next(((d, 0) for d, dim in enumerate(dims_) if dim == (letter,)), None)
                for dims_ in tensors
            )
            atom = next(t.parts[s[0]][0] for t, s in zip(types, slots, strict=True) if s)
            factors.append(Factor(letter, atom, slots[:-1], slots[-1:], parsed.type_of(letter)))
        self.nodes.append(
            Node(index, f"n{index}", op, Role.OP, phase, args=inputs, inputs=inputs,
                 outputs=(types[-1],), module=module, key=key or f"{op}.{index}",
                 factors=tuple(factors), partial=partial)
        )  # fmt: skip
        return Ref(index)

    def output(self, role: Role, target: str, ref: Ref) -> None:
        phase = Phase.BACKWARD if role is Role.GRAD else Phase.FORWARD
        self.nodes.append(
            Node(len(self.nodes), "output", "output", role, phase, inputs=(ref,),
                 key=f"{role.value}:{target}", target=target)
        )  # fmt: skip

    def graph(self) -> Graph:
        atoms = tuple(
            Atom(size, name, name in self.params.split()) for name, size in self.sizes.items()
        )
        graph = Graph("hand-made", tuple(self.nodes), atoms)
        graph.check()
        return graph


def linear_step(batch: int, hidden: int, out: int, layers: int = 1) -> Graph:
    """y = x W_1 ... W_layers, all of y's gradients given: every W has one, x has none."""
    sizes = {"b": batch, "h0": hidden}
    sizes |= {f"h{i + 1}": out if i == layers - 1 else hidden for i in range(layers)}
    b = Builder(sizes, params=" ".join(name for name in sizes if name != "b"))
    weights = [b.placeholder(Role.PARAM, f"w{i}", f"h{i} h{i + 1}") for i in range(layers)]
    values = [b.placeholder(Role.INPUT, "x", "b h0")]
    tangent = b.placeholder(Role.TANGENT, "y", f"b h{layers}")
    for i, weight in enumerate(weights):
        values.append(
            b.op("aten.mm.default", "m k, k n -> m n", (values[-1], weight), f"b h{i + 1}",
                 key=f"forward.{i}", module=f"layers.{i}")
        )  # fmt: skip
    b.output(Role.VALUE, "y", values[-1])
    gradient = tangent
    for i in reversed(range(layers)):
        grad = b.op("aten.mm.default", "m k, m n -> k n", (values[i], gradient), f"h{i} h{i + 1}",
                    key=f"wgrad.{i}", phase=Phase.BACKWARD, module=f"layers.{i}")  # fmt: skip
        b.output(Role.GRAD, f"w{i}", grad)
        if i:
            gradient = b.op("aten.mm.default", "m n, k n -> m k", (gradient, weights[i]),
                            f"b h{i}", key=f"dgrad.{i}", phase=Phase.BACKWARD,
                            module=f"layers.{i}")  # fmt: skip
    return b.graph()
