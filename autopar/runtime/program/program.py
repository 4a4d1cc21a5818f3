"""The local graphs of a plan, the same for all ranks.

Collectives in them are ops of `torch.ops._c10d_functional` whose group is the name of a mesh axis,
and what depends on the rank is one of `symbols`. `codegen.bind` puts process groups and constants
in their place for one rank; `spmd` runs them as they are, for all ranks at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from autopar.ir.sharding import Sharding


@dataclass(frozen=True)
class Program:
    """A forward and a backward graph over local tensors; both take one list, which they clear.

    `forward_inputs` are `param:NAME` (this rank's shard, as stored), `buffer:NAME` and `input:I`
    (whole). `forward_outputs` are `loss:POS`, `value:POS`, `detached:POS`, `mutation:NAME` (the new
    value of a buffer), `update:NAME` (of a parameter, sharded as it is stored), and `saved:K`,
    which may be one of the inputs itself. `backward_inputs` are `saved:K` and
    `tangent:POS`, `backward_outputs` are `grad:NAME`, sharded as the parameter is stored.
    `backward` is None where there is nothing to differentiate. `detached_shardings` gives the
    sharding of each detached output by its position.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None
    forward_inputs: tuple[str, ...]
    forward_outputs: tuple[str, ...]
    backward_inputs: tuple[str, ...] = ()
    backward_outputs: tuple[str, ...] = ()
    detached_shardings: Mapping[int, Sharding] = field(default_factory=dict[int, Sharding])
