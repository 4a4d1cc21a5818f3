"""What a device holds of parameters all the time: they, their gradients and the states of their
optimizer. Gradients are there in forward too: a loop that accumulates keeps them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cost_model.optimizer import state_bytes
from autopar.cost_model.optimizer_kinds import Optimizer, find_optimizers
from autopar.ir.graph import Graph, Node, Role, per_graph
from autopar.ir.redistribute import local_bytes
from autopar.ir.sharding import Sharding


@per_graph
def trained(graph: Graph) -> frozenset[str]:
    """The parameters that have gradients. A graph without a backward is of a model that another one
    trains: all of its parameters may have them."""
    with_gradient = frozenset(node.target for node in graph.with_role(Role.GRAD))
    return with_gradient or frozenset(node.target for node in graph.with_role(Role.PARAM))


class ParamMemory:
    """That of the parameters of `graph`, on a mesh of `sizes` of devices of a kind ("cuda", "cpu"),
    which are stepped on by the `optimizers` of that text."""

    def __init__(self, graph: Graph, sizes: Sequence[int], device: str, optimizers: str) -> None:
        self._graph, self._sizes, self._device = graph, sizes, device
        self._optimizers, self._trained = find_optimizers(optimizers), trained(graph)

    def optimizer(self, param: Node) -> Optimizer | None:
        """What steps on a parameter; None for one that is not trained."""
        return None if param.target not in self._trained else self._optimizers.of(param)

    def local_bytes(self, param: Node, storage: Sharding) -> int:
        """Of one stored so on one rank."""
        return local_bytes(param.outputs[0], self._graph.atoms, storage, self._sizes)

    def gradient_bytes(self, param: Node, storage: Sharding) -> int:
        """Of its gradient."""
        return self.local_bytes(param, storage) if self.optimizer(param) else 0

    def state_bytes(
        self, param: Node, storage: Sharding, rounded: Callable[[int], int] = int
    ) -> int:
        """Of the states of its optimizer, each `rounded` as an allocator does."""
        optimizer, tensor = self.optimizer(param), param.outputs[0]
        if optimizer is None:
            return 0
        where = tensor, self._graph.atoms, storage, self._sizes, self._device
        return sum(map(rounded, state_bytes(optimizer, *where)))

    def at_rest(self, param: Node, storage: Sharding) -> int:
        """Of all of it, as it would be without an allocator."""
        both = self.local_bytes(param, storage) + self.gradient_bytes(param, storage)
        return both + self.state_bytes(param, storage)
