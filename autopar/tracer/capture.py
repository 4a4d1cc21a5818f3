"""From a model and its inputs to one joint forward and backward FX graph, on fake tensors.

Fake CPU tensors of global shapes stand for parameters, buffers and inputs, so nothing is computed
or allocated, whatever device the model is on. The model is as before afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import TraceError
from autopar.ir.graph import Role
from autopar.runtime.program.externals import Substitutes, external_name
from autopar.runtime.program.spent import is_spent
from autopar.tracer import torch_private
from autopar.tracer.calls import CallMode
from autopar.tracer.effects import Fakes, refused, without_inner_backward
from autopar.tracer.failures import is_data_dependent, trace_error
from autopar.tracer.functions import averages_as_tensors
from autopar.tracer.fx_graphs import MODULE_KEY
from autopar.tracer.held_tensors import check_constants, check_paths
from autopar.tracer.huggingface import prepared
from autopar.tracer.known import Known
from autopar.tracer.stand_ins import MOST_TRACES, fake_tensor, replace_states, tied_parameters
from autopar.tracer.updates import hidden_updates
from autopar.tracer.watch import Watch, untouched
from autopar.tracer.wrappers import unwrapped

PREFIX = "model."
"""The wrapper's prefix of the names of the model's parameters and buffers."""

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


OutputFilter = Callable[[int, str], bool | None]
"""Whether an output, by its position and its name ("logits"), is to be differentiable even if
another one is a loss; None if it is not to be returned, unless it is a loss."""


def only_losses(_position: int, _name: str) -> bool:
    """The default `OutputFilter`."""
    return False


@dataclass(frozen=True)
class CapturedLeaf:
    """A leaf of the model's output: a tensor of `role`, or the constant `value`. `name` is the path
    to it ("logits"), and `has_grad` says whether it has a gradient in eager. It `is_left_out` if it
    is a tensor that is not returned."""

    role: Role | None = None
    value: Any = None
    name: str = ""
    has_grad: bool = False
    is_left_out: bool = False


@dataclass
class Capture:
    """A joint graph and how its flat inputs and outputs relate to the model's. Graph input
    `PlainAOTInput(i)` is leaf `tensor_inputs[i]` of (args, kwargs), and `PlainAOTOutput(i)` leaf
    `tensor_outputs[i]` of the output. The inputs that are `external` have a gradient, and are no
    parameters of the model."""

    gm: fx.GraphModule
    in_spec: torch_private.TreeSpec
    out_spec: torch_private.TreeSpec
    tensor_inputs: tuple[int, ...]
    outputs: tuple[CapturedLeaf, ...]
    tied: dict[str, str] = field(default_factory=dict)
    external: frozenset[str] = frozenset()

    def name_of(self, desc: torch_private.AOTInput) -> str:
        """The user's name of the parameter or buffer of a descriptor; of several, the first."""
        assert isinstance(desc, torch_private.ParamAOTInput | torch_private.BufferAOTInput)
        name = desc.target.removeprefix(PREFIX)
        return self.tied.get(name, name)

    @property
    def tensor_outputs(self) -> tuple[int, ...]:
        return tuple(i for i, leaf in enumerate(self.outputs) if leaf.role is not None)


class _Step(nn.Module):
    """Calls `model` on the tensor leaves of its inputs. Returns the tensor leaves of its output,
    without gradient where none is requested, and describes them in `outputs`."""

    def __init__(
        self,
        model: nn.Module,
        leaves: list[Any],
        spec: torch_private.TreeSpec,
        paths: dict[nn.Module, str],
        selects: OutputFilter,
        watch: Watch,
    ) -> None:
        super().__init__()
        self.model = model
        self.leaves = leaves
        self.spec = spec
        self.paths = paths
        self.selects = selects
        self.watch = watch
        self.known: Known | None = None
        self.held = [
            (id(x), table, name)
            for table in (module._parameters for module in model.modules())
            for name, x in table.items()
        ]
        self.externals, self.discoveries = tuple(watch.externals), watch.discoveries
        self.external: frozenset[str] = frozenset()
        self.meet = watch.meet_real
        self.calls = CallMode()
        self.out_spec: torch_private.TreeSpec | None = None
        self.outputs: tuple[CapturedLeaf, ...] = ()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        args, kwargs = torch_private.tree_unflatten(leaves, self.spec)
        self.calls = CallMode(self.known, self.model, self.watch.note)
        with (
            self.calls,
            refused(self.model),
            annotated(self.paths),
            hidden_updates(self.model),
            self.watch.forward(),
            Substitutes(self._substitutes(), self.meet),
        ):
            result = self.model(*args, **kwargs)
        if self.calls.refused is not None:
            raise self.calls.refused
        outputs, self.out_spec = torch_private.tree_flatten(result)
        if self.meet == self.watch.meet and self.watch.discoveries == self.discoveries:
            check_paths(outputs)
        names = _names(outputs, result)
        roles = output_roles(outputs, [self.selects(i, name) for i, name in enumerate(names)])
        spent: set[int] = set()
        if self.calls.spends_graphs:
            spent = {i for i, role in enumerate(roles) if role and is_spent(outputs[i])}
            roles = [Role.DETACHED if i in spent else role for i, role in enumerate(roles)]
        self.outputs = tuple(
            CapturedLeaf(role, None, name, x.requires_grad and i not in spent, role is None)
            if isinstance(x, Tensor)
            else CapturedLeaf(role, x, name)
            for i, (x, role, name) in enumerate(zip(outputs, roles, names, strict=True))
        )
        # An output that shares memory with another tensor would be rebuilt outside of the graph.
        return tuple(
            x.detach().clone() if role is Role.DETACHED else x.clone()
            for x, role in zip(outputs, roles, strict=True)
            if role is not None
        )

    def stand_in(self, make: Callable[[Tensor], Tensor]) -> None:
        """Put stand-ins in the place of all tensors that are no inputs."""
        self.external = replace_states(self.model, make, self.watch.overwritten)
        for number, tensor in enumerate(self.externals):
            name = external_name(number)
            self.register_buffer(name, make(tensor))
            self.external |= {name}

    def _substitutes(self) -> dict[int, Tensor]:
        """The stand-ins of parameters and external tensors, by identity, for places other than
        modules in which forward finds them."""
        substitutes = {
            number: state
            for number, table, name in self.held
            if (state := table.get(name)) is not None
        }
        pairs = enumerate(self.externals)
        return substitutes | {id(x): self.get_buffer(external_name(number)) for number, x in pairs}


def _names(leaves: list[Any], result: Any) -> list[str]:
    """The name of each leaf of an output: the path to it (`more.1`), or else its position."""
    paths = {id(value): path for path, value in _item_paths(result) if path}
    return [paths.get(id(leaf), str(i)) for i, leaf in enumerate(leaves)]


def _item_paths(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, item) of all that is in nested mappings and sequences."""
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    else:
        yield path, value
        return
    for key, inner in items:
        yield from _item_paths(inner, f"{path}.{key}" if path else str(key))


def output_roles(leaves: list[Any], selected: list[bool | None]) -> list[Role | None]:
    """The role of each leaf of a model's output; None for what is no tensor, or not returned.

    Scalars that can be differentiated are losses. If there is a loss, only `selected` other outputs
    have a gradient; without one, every tensor that can be differentiated has one. Where gradients
    are off, all floating-point tensors count as differentiable.
    """
    graded = any(isinstance(x, Tensor) and x.requires_grad for x in leaves)

    def differentiable(x: Any) -> bool:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return floating and (x.requires_grad or not graded)

    losses = [differentiable(x) and x.dim() == 0 for x in leaves]
    roles: list[Role | None] = []
    for x, is_loss, want in zip(leaves, losses, selected, strict=True):
        if isinstance(x, Tensor):
            is_value = differentiable(x) and (want or not any(losses))
            role = Role.LOSS if is_loss else Role.VALUE if is_value else Role.DETACHED
            roles.append(None if want is None and not is_loss else role)
        elif isinstance(x, _PLAIN):
            roles.append(None)
        else:
            name = type(x).__qualname__
            raise TraceError(
                f"the model returns a {name}, which autopar cannot look into: return tensors in "
                f"tuples, lists or dicts, or register {name} with torch.export.register_dataclass"
            )
    return roles


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    selects: OutputFilter,
    watch: Watch,
) -> Capture:
    """The joint graph of `model(*args, **kwargs)`; TraceError where there is none."""
    leaves, spec = torch_private.tree_flatten((args, kwargs))
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            raise TraceError(
                f"tensor {index} of the model's inputs requires grad, but autopar differentiates "
                "with respect to parameters only: pass it detached, or make it a parameter"
            )
    tied = tied_parameters(model)
    for _ in range(MOST_TRACES):
        known = watch.discoveries
        step, gm = _captured(model, leaves, spec, selects, watch)
        if watch.discoveries == known:
            break
    else:
        raise TraceError(
            "forward computes with other tensors that require a gradient each time: keep them in a "
            "list, or as attributes of a module"
        )
    check_constants(gm, model)
    assert step.out_spec is not None
    tensors = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
    return Capture(gm, spec, step.out_spec, tensors, step.outputs, tied, step.external)


def _captured(
    model: nn.Module,
    leaves: list[Any],
    spec: torch_private.TreeSpec,
    selects: OutputFilter,
    watch: Watch,
) -> tuple[_Step, fx.GraphModule]:
    try:
        return _joint_graph(model, leaves, spec, selects, watch, as_compiled=True)
    except TraceError as error:
        # The values that the model looks at may follow from its code alone. And some models skip
        # something that they need when they are compiled: they only run as in eager.
        compiled = is_data_dependent(error)
        watch.spare_replaced()
        try:
            return _joint_graph(model, leaves, spec, selects, watch, Known, as_compiled=compiled)
        except TraceError as last:
            raise last from None


def _joint_graph(
    model: nn.Module,
    leaves: list[Any],
    spec: torch_private.TreeSpec,
    selects: OutputFilter,
    watch: Watch,
    kind: type[Fakes] = Fakes,
    *,
    as_compiled: bool,
) -> tuple[_Step, fx.GraphModule]:
    mode = kind(allow_non_fake_inputs=True)
    paths = {module: name for name, module in model.named_modules()}
    stand_in = partial(fake_tensor, mode=mode)
    with (
        staged(model, leaves, spec, stand_in, paths, selects, watch) as (step, fakes),
        warnings.catch_warnings(),
    ):
        # This warning is of a backward that fails: the error says so, and it may be tried again.
        warnings.filterwarnings("ignore", "Error detected in")
        step.known = mode if isinstance(mode, Known) else None
        step.meet = watch.meet
        try:
            with without_inner_backward():
                gm = torch_private.joint_graph(step, fakes, mode, as_compiled=as_compiled)
            mode.raise_refused()
            return step, gm
        except TraceError:
            raise
        except Exception as error:
            raise trace_error(error, paths, step.calls.name_of) from error


@contextmanager
def staged(
    model: nn.Module,
    leaves: list[Any],
    spec: torch_private.TreeSpec,
    stand_in: Callable[[Tensor], Tensor],
    paths: dict[nn.Module, str],
    selects: OutputFilter,
    watch: Watch,
) -> Generator[tuple[_Step, tuple[Tensor, ...]], None, None]:
    """The step of `model` and the tensors to call it on, with stand-ins for parameters, buffers and
    inputs. Inside, the model is prepared for the call."""
    given = [stand_in(x) if isinstance(x, Tensor) else x for x in leaves]
    with ExitStack() as stack:
        stack.enter_context(untouched(model.modules()))
        step = _Step(model, given, spec, paths, selects, watch)
        step.stand_in(stand_in)
        for each in (prepared(model), autocast_on_cpu(), unwrapped(), averages_as_tensors()):
            stack.enter_context(each)
        yield step, tuple(x for x in given if isinstance(x, Tensor))


@contextmanager
def annotated(paths: dict[nn.Module, str]) -> Generator[None, None, None]:
    """Every node made while a module runs is labelled with its path."""
    entered: list[tuple[nn.Module, Any]] = []

    def enter(module: nn.Module, _args: Any) -> None:
        label = torch_private.annotate({MODULE_KEY: paths[module]})
        label.__enter__()
        entered.append((module, label))

    def leave(module: nn.Module | None, _args: Any = None, _output: Any = None) -> None:
        # A module that raised, and whose caller went on, is still entered.
        while entered:
            last, label = entered.pop()
            label.__exit__(None, None, None)
            if last is module:
                break

    handles: list[Any] = [m.register_forward_pre_hook(enter, prepend=True) for m in paths]
    handles += [module.register_forward_hook(leave) for module in paths]
    try:
        yield
    finally:
        leave(None)
        for handle in handles:
            handle.remove()


@contextmanager
def autocast_on_cpu() -> Generator[None, None, None]:
    """Autocast as the caller has it on the model's device, on the CPU where the fakes are."""
    if torch.is_autocast_enabled("cuda"):
        with torch.autocast("cpu", dtype=torch.get_autocast_dtype("cuda")):
            yield
    else:
        yield
