"""From constraints to the choices that they leave on one mesh (`limits`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from autopar.cost_model.limits import Arcs, LimitRule, Limits, Passes, Rules, Shardings, storages
from autopar.errors import ConstraintError, InfeasibleError
from autopar.ir.casts import casts_of
from autopar.ir.choices import Choice, Decision, axis_options
from autopar.ir.contractions import batch_atoms, find_matmuls
from autopar.ir.graph import STORED_ROLES, Graph, Node, Phase, Ref, Role, TensorType
from autopar.ir.grouping import grouped
from autopar.ir.mesh import Mesh
from autopar.ir.sharding import P, R, Sharding
from autopar.ir.uses import Group, Use, read_in_forward, requirement, root_key, root_of
from autopar.plans.requests.constraints import (
    OP_KINDS,
    Constraint,
    MeshConstraint,
    Test,
    Tests,
    holds,
    is_batch,
    option_holds,
)
from autopar.plans.requests.matching import covers, general, matches, outer_names

# What modules return: the tensors that are made inside a module and used outside of it.

_CHANGES = (Role.MUTATION, Role.UPDATE)


@dataclass(frozen=True, slots=True)
class Returned:
    """`module` returns `tensor`, which is `root` after the views `chain`, from the root on."""

    module: str
    root: Ref
    chain: tuple[int, ...]
    tensor: Ref


def returned(graph: Graph, pattern: str) -> Iterator[Returned]:
    """The floating-point tensors that modules matched by `pattern` return to the rest of the
    forward phase, in order."""
    readers = (n for n in graph.nodes if n.phase is Phase.FORWARD and n.role not in _CHANGES)
    users = grouped((ref, node) for node in readers for ref in node.inputs)
    for ref, using in sorted(users.items()):
        maker = graph.nodes[ref.node]
        if maker.role is not Role.OP or "float" not in graph.type_of(ref).dtype:
            continue
        for module in (maker.module, *outer_names(maker.module)):
            if matches(pattern, module) and not all(_is_inside(user, module) for user in using):
                root, chain = root_of(graph, ref)
                yield Returned(module, root, chain, ref)


def _is_inside(user: Node, module: str) -> bool:
    """Whether an op belongs to a module. The model's outputs are outside of every module."""
    return user.role is Role.OP and (user.module == module or module in outer_names(user.module))


Named = Callable[[str, str], bool]
"""Whether a pattern, the first argument, covers a name."""

_NO_ROLES: Mapping[str, str] = MappingProxyType({})
_OUTPUTS = (Role.LOSS, Role.VALUE, Role.DETACHED)


def impose(
    graph: Graph, mesh: Mesh, groups: Sequence[Group], imposed: Sequence[MeshConstraint]
) -> Limits:
    """The limits that `imposed` sets to the choices on `mesh`.

    InfeasibleError if a parameter cannot be stored as a constraint says. ConstraintError if a
    constraint covers only some nodes of a class, which is planned as one.
    """
    imposing = _Imposing(graph, mesh, groups)
    for each in imposed:
        imposing.add(each.constraint, each.alternatives)
    return imposing.limits()


@dataclass
class _Imposing:
    """Collects the limits. `spoken` has, by class, kind and placement of a constraint, the nodes it
    covers with the constraint."""

    graph: Graph
    mesh: Mesh
    groups: Sequence[Group]
    choices: Rules = field(default_factory=dict[str, list[LimitRule]])
    tests: dict[str, dict[Constraint, Tests]] = field(
        default_factory=dict[str, dict[Constraint, Tests]]
    )
    saved: dict[str, Tests] = field(default_factory=dict[str, Tests])
    arcs: Arcs = field(default_factory=Arcs)
    spoken: dict[tuple[str, str, str], dict[int, Constraint]] = field(
        default_factory=dict[tuple[str, str, str], dict[int, Constraint]]
    )

    def limits(self) -> Limits:
        """The limits of all constraints that were added."""
        self._check_whole_classes()
        given = {key: self._storages(key, tests) for key, tests in self.tests.items()}
        return Limits(
            self.graph,
            self.mesh,
            batch_atoms(self.graph),
            self.choices,
            given,
            self.saved,
            self.arcs,
        )

    def add(self, constraint: Constraint, alternatives: Sequence[Tests]) -> None:
        """Add a constraint that any of its `alternatives` meets."""
        if not any(alternatives):
            return
        kind, tests = constraint.kind, alternatives[0]
        if not kind:
            self._params(constraint, tests, covers, 0)
            self._params(constraint, tests, covers, 1)
            self._ops(constraint, alternatives)
            self._saves(constraint, tests)
        elif kind in OP_KINDS:
            self._ops(constraint, alternatives)
        elif kind == "saved":
            self._saves(constraint, tests)
        elif kind == "module":
            for each in returned(self.graph, constraint.pattern):
                self._returned(constraint, each, tests)
        elif kind == "input":
            self._inputs(constraint, tests)
        elif kind == "output":
            self._outputs(constraint, tests)
        else:
            self._params(constraint, tests, matches, 0 if kind == "param" else 1)

    @cached_property
    def members(self) -> dict[str, list[Node]]:
        return grouped((node.key, node) for node in self.graph.nodes)

    @cached_property
    def params(self) -> dict[str, Node]:
        return {n.target: n for n in self.graph.with_role(Role.PARAM) if not n.external}

    def _speaks(self, node: Node, kind: str, constraint: Constraint) -> bool:
        """Records that `constraint` covers `node`. Whether no other node of its class is."""
        by_node = self.spoken.setdefault((node.key, kind, str(constraint.placement)), {})
        by_node.setdefault(node.index, constraint)
        return len(by_node) == 1

    def _check_whole_classes(self) -> None:
        for (key, _, _), by_node in self.spoken.items():
            other = next((n for n in self.members[key] if n.index not in by_node), None)
            if other is not None:
                index, constraint = next(iter(by_node.items()))
                name = _name(self.graph.nodes[index])
                raise ConstraintError(
                    f"{constraint.origin}: {name} and {_name(other)} are planned as one, and this "
                    f"speaks of one of them; write {general(name)}, or ask the same of both"
                )

    def _params(self, constraint: Constraint, tests: Tests, named: Named, which: int) -> None:
        """`which` is 0 for the storage, 1 for the sharding for backward."""
        unmoved = [test.axis for test in tests if test.what == "unmoved"]
        placed = tuple(test for test in tests if test.what != "unmoved")
        pattern = constraint.pattern
        exact = pattern in self.params and named is matches
        for name in [pattern] if exact else self.params:
            node = self.params[name]
            if not (exact or named(pattern, name)):
                continue
            if unmoved:
                self._stays(node.target, unmoved)
            if placed and self._speaks(
                node, "storage" if which == 0 else "for_backward", constraint
            ):
                if which == 0:
                    self.tests.setdefault(node.key, {})[constraint] = placed
                elif node.key not in read_in_forward(self.graph):
                    continue
                self._rule(
                    node.key,
                    constraint,
                    lambda _, __, outputs, tensor=node.outputs[0]: all(
                        holds(test, tensor, batch_atoms(self.graph), outputs[which])
                        for test in placed
                    ),
                )
                if which == 1:
                    self._copies(node, placed)

    def _copies(self, param: Node, tests: Tests) -> None:
        """A constraint on the sharding for backward applies to casts of the parameter too. Where
        those have other dims, only placements without a dim do."""
        for index, of in casts_of(self.graph).copies.items():
            node = self.graph.nodes[index]
            if of == param.index and node.phase is Phase.FORWARD:
                same_dims = node.outputs[0].parts == param.outputs[0].parts
                applicable = (t for t in tests if same_dims or t.placement in (None, R))
                key = root_key(self.graph, Ref(index))
                self.saved[key] = (*self.saved.get(key, ()), *applicable)

    def _rule(
        self, key: str, constraint: Constraint, passes: Passes, *, lenient: bool = False
    ) -> None:
        self.choices.setdefault(key, []).append(LimitRule(constraint, passes, lenient))

    def _storages(self, key: str, given_tests: dict[Constraint, Tests]) -> tuple[Sharding, ...]:
        """The storages that meet all constraints of a class of parameters, or any one alone: so the
        rules on the class can tell which constraints clash."""
        node = self.members[key][0]
        tensor, allowed = node.outputs[0], dict[Sharding, None]()
        together = tuple(test for tests in given_tests.values() for test in tests)
        for tests in (together, *given_tests.values()):
            allowed |= dict.fromkeys(storages(tensor, self.graph.atoms, self.mesh, tests))
        for constraint, tests in given_tests.items():
            if not any(
                all(holds(t, tensor, batch_atoms(self.graph), s) for t in tests) for s in allowed
            ):
                raise InfeasibleError(
                    f"{constraint.origin}: parameter {node.target} of shape {list(tensor.shape)} "
                    f"cannot be stored as {constraint.placement} on mesh "
                    f"{self.mesh or 'of one device'}"
                )
        return tuple(allowed)

    def _stays(self, name: str, axes: Sequence[int]) -> None:
        """Parameter `name`, cast or not, is used on `axes` as it is stored there."""

        def leads(source: Sharding, target: Sharding) -> bool:
            return all(source[k] in (target[k], P) for k in axes)

        for ref, derived in find_matmuls(self.graph).derived.items():
            node = self.graph.nodes[ref.node]
            if derived == name and not node.view:
                self.arcs.setdefault((node.key, ref.output), []).append((None, leads))

    def _ops(self, constraint: Constraint, alternatives: Sequence[Tests]) -> None:
        for node in self.graph.with_role(Role.OP):
            if node.view or not covers(constraint.pattern, node.module):
                continue
            kind = constraint.kind
            is_meant = kind in ("", "ops") or kind in self._kinds(node)
            if is_meant and self._speaks(node, kind, constraint):
                roles = find_matmuls(self.graph).roles.get(node.key, _NO_ROLES)
                passes = self._does(node, alternatives, roles)
                self._rule(node.key, constraint, passes, lenient=True)

    def _kinds(self, node: Node) -> Iterator[str]:
        """The kinds of op that `node` is one of (`constraints.OP_KINDS`)."""
        if node.key in find_matmuls(self.graph).roles:
            yield "matmul"
        if self._is_batched(node):
            yield "batched"
        else:
            yield "casts" if node.index in find_matmuls(self.graph).casts else "unbatched"

    def _is_batched(self, node: Node) -> bool:
        options = (axis_options(node, self.graph.atoms, size) for size in self.mesh.sizes)
        return any(
            is_batch(node, option, batch_atoms(self.graph)) for some in options for option in some
        )

    def _does(self, node: Node, alternatives: Sequence[Tests], roles: Mapping[str, str]) -> Passes:
        return lambda choice, _, __: (
            isinstance(choice, Choice)
            and any(
                all(
                    option_holds(t, node, choice.options[t.axis], batch_atoms(self.graph), roles)
                    for t in tests
                )
                for tests in alternatives
            )
        )

    def _saves(self, constraint: Constraint, tests: Tests) -> None:
        for node in self.graph.with_role(Role.OP):
            if node.view or node.phase is not Phase.FORWARD:
                continue
            if covers(constraint.pattern, node.module) and self._speaks(node, "saved", constraint):
                for output in range(len(node.outputs)):
                    key = root_key(self.graph, Ref(node.index, output))
                    self.saved[key] = (*self.saved.get(key, ()), *tests)

    def _outputs(self, constraint: Constraint, tests: Tests) -> None:
        batch = batch_atoms(self.graph)
        for node in self.graph.with_role(*_OUTPUTS):
            if matches(constraint.pattern, node.target):
                tensor = self.graph.type_of(node.inputs[0])

                def passes(
                    _: Decision, inputs: Shardings, __: Shardings, t: TensorType = tensor
                ) -> bool:
                    return all(holds(test, t, batch, inputs[0]) for test in tests)

                self._rule(node.key, constraint, passes)

    def _inputs(self, constraint: Constraint, tests: Tests) -> None:
        for node in self.graph.with_role(Role.INPUT):
            if matches(constraint.pattern, node.target):
                self._used_as(Ref(node.index), constraint, tests)

    def _used_as(self, root: Ref, constraint: Constraint, tests: Tests) -> None:
        """Every op that uses `root` needs it as `tests` say."""
        tensor, batch = self.graph.type_of(root), batch_atoms(self.graph)
        self._limit_uses(
            root, constraint, lambda state: all(holds(t, tensor, batch, state) for t in tests)
        )

    def _limit_uses(
        self, root: Ref, constraint: Constraint, allowed: Callable[[Sharding], bool]
    ) -> None:
        """Uses of `root` may only need it in shardings that are `allowed`."""
        for group in self.groups:
            for use in group.uses if group.root == root else ():
                user = self.graph.nodes[use.node]

                def passes(_: Decision, inputs: Shardings, __: Shardings, use: Use = use) -> bool:
                    state = requirement(self.graph, use, inputs[use.arg])
                    return state is None or allowed(state)

                if user.role not in STORED_ROLES:
                    self._rule(user.key, constraint, passes)

    def _returned(self, constraint: Constraint, what: Returned, tests: Tests) -> None:
        """A returned tensor is made as `tests` say, or as partial sums that are reduced to that."""
        root = self.graph.nodes[what.root.node]
        tensor, batch = self.graph.type_of(what.root), batch_atoms(self.graph)
        at_root = tuple(self._behind(constraint, what, test) for test in tests)
        if root.role is not Role.OP:
            self._used_as(what.root, constraint, at_root)
            return
        axes = [test.axis for test in tests]
        self._limit_uses(what.root, constraint, lambda state: all(state[k] != P for k in axes))
        if not self._speaks(root, f"output {what.root.output}", constraint):
            return

        def passes(_: Decision, __: Shardings, outputs: Shardings) -> bool:
            state = outputs[what.root.output]
            return all(state[t.axis] == P or holds(t, tensor, batch, state) for t in at_root)

        def leads(source: Sharding, target: Sharding) -> bool:
            moved = (t for t in at_root if source[t.axis] == P and target[t.axis] != P)
            return all(holds(test, tensor, batch, target) for test in moved)

        self._rule(root.key, constraint, passes)
        self.arcs.setdefault((root.key, what.root.output), []).append((Phase.FORWARD, leads))

    def _behind(self, constraint: Constraint, what: Returned, test: Test) -> Test:
        """`test` of a returned tensor, as a test of the root that it is a view of."""
        placement = test.placement
        if placement is None:
            return test
        use = Use(what.tensor.node, 0, what.chain)
        tensor = self.graph.type_of(what.tensor)
        known = placement.kind == "R" or placement.slot in dict(tensor.slots())
        state = requirement(self.graph, use, Sharding((placement,))) if known else None
        if state is None:
            raise InfeasibleError(
                f"{constraint.origin}: {what.module} returns {list(tensor.shape)}, which cannot be "
                f"{placement}"
            )
        return replace(test, what=state[0])


def _name(node: Node) -> str:
    return node.target or node.module or node.op
