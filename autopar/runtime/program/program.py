"""The local graphs of a plan, the same for all ranks.

Collectives in them are ops of `torch.ops._c10d_functional` whose group is the name of a mesh axis.
Ops that depend on the rank are `symbols`. `codegen.bind` replaces both by process groups and
constants for one rank; `spmd` runs the graphs as they are, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.sharding import Sharding

MICROBATCH_INPUT = "microbatch:"
"""The input of a graph that is the number of its microbatch."""

WEIGHTS = "weights"
"""The name of the second part of backward, if it has two."""


@dataclass(frozen=True)
class Sum:
    """A value that microbatches pass on under `name`: an input of the graph of `phase` and, before
    the last microbatch, an output. It is a sum so far, of `shape` and `dtype`. If it
    `is_collected`, it is rows: each microbatch returns one of dim 1 of `shape`, and the last takes
    those of all before it."""

    name: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    is_collected: bool = False


@dataclass(frozen=True)
class Program:
    """A forward and a backward graph over local tensors; both take one list, which they clear.

    `forward_inputs` are `param:NAME` (this rank's shard, as stored), `buffer:NAME` and `input:I`
    (whole). `forward_outputs` are `loss:POS`, `value:POS`, `detached:POS`, `mutation:NAME` (the new
    value of a buffer), `update:NAME` (of a parameter, sharded as it is stored), and `saved:K`. A
    saved tensor may be an input itself. `backward_inputs` are `saved:K` and `tangent:POS`,
    `backward_outputs` are `grad:NAME`, sharded as the parameter is stored. `backward` is None where
    there is nothing to differentiate. `detached_shardings` gives the sharding of each detached
    output by its position.

    With microbatches these are the graphs of the last of `microbatches`. `before` has the graphs of
    the others, whose outputs are `sums` and saved tensors. Both also take `sums`, and
    `MICROBATCH_INPUT`, the number of the microbatch in a tensor of one element. `tangent_dtypes`
    are the dtypes of tangents; if it `is_proportional`, gradients are known to be in proportion to
    these.

    In a pipeline stage, inputs include `received:NAME`, and outputs `sent:STAGE:NAME`, of tensors
    of the whole step (`ir.passes.stages`). If its backward has two parts, `weights` is the second.
    It takes further `saved:K` from the first, and returns the gradients.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    forward_inputs: tuple[str, ...]
    forward_outputs: tuple[str, ...]
    backward_inputs: tuple[str, ...] = ()
    backward_outputs: tuple[str, ...] = ()
    detached_shardings: Mapping[int, Sharding] = field(default_factory=dict[int, Sharding])
    before: Program | None = None
    microbatches: int = 1
    sums: tuple[Sum, ...] = ()
    tangent_dtypes: Mapping[str, str] = field(default_factory=dict[str, str])
    is_proportional: bool = False
    weights: fx.GraphModule | None = None
    weights_inputs: tuple[str, ...] = ()
    weights_outputs: tuple[str, ...] = ()

    def names(self, phase: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(inputs, outputs) of the graph of a phase, or of `WEIGHTS`."""
        if phase == "forward":
            return self.forward_inputs, self.forward_outputs
        if phase == WEIGHTS:
            return self.weights_inputs, self.weights_outputs
        return self.backward_inputs, self.backward_outputs

    @property
    def gradients(self) -> tuple[str, ...]:
        """The gradients of parameters, by name, in either part of backward."""
        return tuple(
            n for n in self.backward_outputs + self.weights_outputs if n.startswith("grad:")
        )

    @property
    def parts(self) -> tuple[Program, ...]:
        """The program of the last microbatch, then that of the others."""
        return (self,) if self.before is None else (self, self.before)

    @property
    def graphs(self) -> dict[tuple[bool, str], fx.GraphModule]:
        """The graphs, by (whether it is for the last microbatch, phase)."""
        return {
            (part is self, phase): gm
            for part in self.parts
            for phase, gm in (
                ("forward", part.forward),
                ("backward", part.backward),
                (WEIGHTS, part.weights),
            )
            if gm is not None
        }
