"""Problems of the shape autopar poses: a transformer's forward and backward on a small mesh.

`transformer` writes each op as an einsum; a choice takes one letter per mesh axis (or none); a
tensor's states are one of `R`, `P` or a letter per axis; a flow's arcs are single-axis collectives
priced by latency and bandwidth. Figures are nanoseconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import numpy as np

from autopar.ir.problem import Flow, Problem, Sink, Usage

SIZES = {"b": 64, "s": 4096, "h": 4096, "k": 32, "d": 128, "f": 16384, "v": 32000}
FLOPS_PER_NS = 400_000.0
BYTES_PER_NS = (50.0, 450.0, 450.0)
LATENCY_NS = (20_000, 8_000, 8_000)


@dataclass
class _Op:
    key: str
    inputs: tuple[str, ...]
    output: str
    whole: str = ""
    linear: bool = False
    storage: bool = False
    interval: tuple[int, int] = (0, 0)
    bytes_per_element: float = 0.0


@dataclass
class _Graph:
    ops: list[_Op] = field(default_factory=list)
    uses: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, op: _Op, sources: tuple[int, ...]) -> int:
        node = len(self.ops)
        self.ops.append(op)
        self.uses += [(source, node, slot) for slot, source in enumerate(sources)]
        return node


def _transformer_graph(num_layers: int) -> _Graph:
    graph = _Graph()
    end = 1_000
    saved: dict[int, tuple[str, ...]] = {}

    def op(name: str, inputs: tuple[str, ...], output: str, *sources: int, **kw: object) -> int:
        node = _Op(name, inputs, output, interval=(len(graph.ops), end), **kw)  # type: ignore[arg-type]
        return graph.add(node, sources)

    def param(name: str, dims: str) -> int:
        return op(name, (), dims, storage=True, bytes_per_element=18.0)

    def act(name: str, inputs: tuple[str, ...], output: str, *sources: int, **kw: object) -> int:
        return op(name, inputs, output, *sources, bytes_per_element=2.0, **kw)

    tape: list[tuple[str, tuple[str, ...], str, tuple[int, ...], int, str]] = []

    def run(name: str, inputs: tuple[str, ...], output: str, *sources: int, whole: str = "") -> int:
        node = act(name, inputs, output, *sources, whole=whole, linear=name.endswith("add"))
        tape.append((name, inputs, output, sources, node, whole))
        return node

    x = act("embed", (), "bsh")
    for layer in range(num_layers):
        n = f"l{layer}."
        w = {
            k: param(n + "w" + k, d)
            for k, d in {
                "q": "hkd",
                "k": "hkd",
                "v": "hkd",
                "o": "kdh",
                "g": "hf",
                "u": "hf",
                "d": "fh",
            }.items()
        }
        y = run(n + "norm1", ("bsh",), "bsh", x, whole="h")
        q, k, v = (run(n + a, ("bsh", "hkd"), "bskd", y, w[a]) for a in "qkv")
        a = run(n + "attn", ("bskd", "bskd", "bskd"), "bskd", q, k, v, whole="sd")
        o = run(n + "o", ("bskd", "kdh"), "bsh", a, w["o"])
        x = run(n + "add", ("bsh", "bsh"), "bsh", x, o)
        y = run(n + "norm2", ("bsh",), "bsh", x, whole="h")
        g, u = (run(n + a, ("bsh", "hf"), "bsf", y, w[a]) for a in "gu")
        m = run(n + "mul", ("bsf", "bsf"), "bsf", g, u)
        d = run(n + "down", ("bsf", "fh"), "bsh", m, w["d"])
        x = run(n + "2add", ("bsh", "bsh"), "bsh", x, d)
    head = param("head", "hv")
    logits = run("logits", ("bsh", "hv"), "bsv", x, head)
    grads: dict[int, list[int]] = {logits: [run("loss", ("bsv",), "bsv", logits, whole="v")]}
    tape.pop()
    for name, inputs, output, sources, node, whole in reversed(tape):
        pieces = grads.pop(node)
        grad = pieces[0]
        for j, piece in enumerate(pieces[1:]):
            grad = op(f"{name}.sum{j}", (output, output), output, grad, piece, linear=True)
        for slot, source in enumerate(sources):
            others = [s for j, s in enumerate(sources) if j != slot]
            dims = [d for j, d in enumerate(inputs) if j != slot]
            if name.endswith("add"):
                piece = grad
            else:
                keep = () if not others else tuple(dims)
                piece = op(
                    f"{name}.d{slot}", (output, *keep), inputs[slot], grad, *others, whole=whole
                )
            grads.setdefault(source, []).append(piece)
    for node, pieces in sorted(grads.items()):
        if graph.ops[node].storage:
            graph.uses.append((pieces[0], node, 0))
    del saved
    return graph


def _choices(op: _Op, mesh: tuple[int, ...]) -> list[tuple[str, ...]]:
    letters = sorted(set("".join(op.inputs) + op.output) - set(op.whole))
    found = []
    for options in product(["-", *letters], repeat=len(mesh)):
        ways: dict[str, int] = {}
        for letter, size in zip(options, mesh, strict=True):
            if letter != "-":
                ways[letter] = ways.get(letter, 1) * size
        if all(SIZES[k] % n == 0 for k, n in ways.items()):
            found.append(options)
    return found


def _states(dims: str, mesh: tuple[int, ...]) -> list[tuple[str, ...]]:
    states = []
    for options in product(["R", "P", *dims], repeat=len(mesh)):
        ways: dict[str, int] = {}
        for letter, size in zip(options, mesh, strict=True):
            if letter in dims:
                ways[letter] = ways.get(letter, 1) * size
        if all(SIZES[k] % n == 0 for k, n in ways.items()):
            states.append(options)
    return states


def _elements(dims: str) -> int:
    count = 1
    for letter in dims:
        count *= SIZES[letter]
    return count


def _arcs(
    dims: str, mesh: tuple[int, ...], states: list[tuple[str, ...]]
) -> list[tuple[int, int, int]]:
    index = {s: i for i, s in enumerate(states)}
    arcs = []
    for state in states:
        shards = 1
        for letter, size in zip(state, mesh, strict=True):
            shards *= size if letter in dims else 1
        for axis, size in enumerate(mesh):
            local = 2 * _elements(dims) / shards
            for to in ["R", *dims]:
                at = state[axis]
                target = (*state[:axis], to, *state[axis + 1 :])
                if to == at or target not in index:
                    continue
                share = (size - 1) / size
                if at == "R":
                    cost = 0
                else:
                    moved = {"R": local * (2 * share if at == "P" else size - 1)}.get(
                        to, local * share
                    )
                    cost = int(LATENCY_NS[axis] + moved / BYTES_PER_NS[axis])
                arcs.append((index[state], index[target], cost))
    return arcs


def transformer(num_layers: int, mesh: tuple[int, ...], memory_limit: int | None = None) -> Problem:
    """Forward and backward of `num_layers` layers and a head; `mesh` is sizes, slow link first."""
    graph = _transformer_graph(num_layers)
    choices = [
        [c for c in _states(op.output, mesh) if "P" not in c]
        if not op.inputs
        else _choices(op, mesh)
        for op in graph.ops
    ]
    flows = []
    for node, op in enumerate(graph.ops):
        uses = [(sink, slot) for source, sink, slot in graph.uses if source == node]
        if not uses:
            continue
        states = _states(op.output, mesh)
        index = {s: i for i, s in enumerate(states)}
        made = [index[tuple(_left(op, letter) for letter in c)] for c in choices[node]]
        sinks = tuple(
            Sink(
                sink,
                np.array(
                    [index[_asked(graph.ops[sink], slot, op.output, c)] for c in choices[sink]],
                    dtype=np.int64,
                ),
            )
            for sink, slot in uses
        )
        tails, heads, costs = (
            np.array(x, dtype=np.int64) for x in zip(*_arcs(op.output, mesh, states))
        )
        flows.append(
            Flow(
                op.key,
                node,
                np.array(made, dtype=np.int64),
                sinks,
                tuple("".join(s) for s in states),
                tails,
                heads,
                costs,
            )
        )
    return Problem(
        name=f"transformer{num_layers}-{'x'.join(map(str, mesh))}",
        keys=tuple(op.key for op in graph.ops),
        labels=tuple(tuple(",".join(c) for c in cs) for cs in choices),
        costs=tuple(
            np.array([_work(op, c, mesh) for c in cs], dtype=np.int64)
            for op, cs in zip(graph.ops, choices)
        ),
        usages=tuple(
            (
                Usage(
                    *((0, 1_000) if op.storage else op.interval),
                    np.array([_held(op, c, mesh) for c in cs], dtype=np.int64),
                ),
            )
            for op, cs in zip(graph.ops, choices)
        ),
        flows=tuple(flows),
        usage_limit=memory_limit,
    )


def _left(op: _Op, letter: str) -> str:
    if not op.inputs:
        return letter
    return "R" if letter == "-" else letter if letter in op.output else "P"


def _asked(op: _Op, slot: int, dims: str, choice: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(letter if letter in dims else "R" for letter in choice)


def _shards(choice: tuple[str, ...], mesh: tuple[int, ...], dims: str) -> int:
    count = 1
    for letter, size in zip(choice, mesh, strict=True):
        count *= size if letter in dims else 1
    return count


def _work(op: _Op, choice: tuple[str, ...], mesh: tuple[int, ...]) -> int:
    if not op.inputs:
        return 0
    letters = "".join(sorted(set("".join(op.inputs) + op.output)))
    shards = _shards(choice, mesh, letters)
    flops = 2 * _elements(letters) / shards if len(op.inputs) > 1 else 0
    moved = sum(2 * _elements(d) / _shards(choice, mesh, d) for d in (*op.inputs, op.output))
    return int(max(flops / FLOPS_PER_NS, moved / 2_000.0)) + 4_000


def _held(op: _Op, choice: tuple[str, ...], mesh: tuple[int, ...]) -> int:
    return int(op.bytes_per_element * _elements(op.output) / _shards(choice, mesh, op.output))
