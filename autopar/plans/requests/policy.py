"""All thresholds of the search, with what chose each. `benchmarks.policy` halves and doubles
them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds of the search. A plan records those it was found with. If a measurement is
    named, it chose the value; benchmarks/README.md has what halving and doubling each does."""

    refined_devices: int = 64
    """Meshes of three axes are tried by default from so many devices on. On eight devices one of
    them takes several times as long as all others together, and little is to be gained."""
    refined_within: float = 0.05
    """A mesh of three axes is tried if both meshes of two axes that it refines have bounds near the
    best plan: above it by at most this part. On 8x8 H100 it is better than the worse of them by at
    most 4 % (ADR 43)."""
    refined_most: int = 3
    """The most of them that are tried, those first that refine the best meshes."""
    refined_nodes: int = 1_000
    """With more nodes in a problem none is tried by default: a mesh of three axes takes as long as
    all others together. Models whose many layers differ have so many."""

    chunks_worth: int = 32
    """Chunks of the loss are tried if scores, and what is computed from them, take at least this
    fraction of a device's memory, as 1/n: they cannot save more than that."""
    chunks_smallest: int = 64
    """A chunk takes at least this fraction of the memory, as 1/n."""
    chunks_rows: int = 256
    """A chunk has at least so many rows: matmuls of fewer take longer."""
    chunks_tries: int = 3
    """The most numbers of chunks that are tried, the largest of use last."""
    chunks_step: int = 4
    """Each number is so many times the one before."""
    chunks_wide_step: int = 8
    """The same if the last is more than 64."""

    hindered_ns: int = 10_000_000
    """By default stages are tried if a step in one loses so much. The search takes seconds to
    minutes, and a step that loses less can hardly win that back in thousands of steps."""
    prices_err: float = 0.1
    """Stages that are tried by default have to win more than this part. On emulated clusters
    (`benchmarks.emulated`) those with an estimated win of 14 % took 3 to 9 % longer, and those with
    15 % or more won."""

    microbatches_per_rank: int = 4
    """In how many microbatches for each rank pipelines are tried first: with fewer, ranks wait for
    a fifth of the step or more, and hold more."""
    fewer_microbatches_gain: float = 1.5
    """By how much less ranks may work in fewer microbatches, where launches count and adding up
    gradients. For example, 8 layers of Llama, 128 wide, in four stages keep a CPU busy for 402 ms
    in 16, 255 ms in 8 and 178 ms in 4."""
    estimate_near: float = 1.03
    """The most that a planned pipeline is estimated to take, in terms of the best that fits: the
    times of segments are known to a few percent."""
    estimate_slack: float = 1.1
    """Up to so many times its estimate a pipeline is as expected, and is not replanned with other
    choices. Mostly it is within 3 %; where memory binds hard, 13 were seen."""
    pipelines_planned: int = 3
    """The most shapes of which all stages are planned, once there is a plan."""
    reordered_waits: float = 0.02
    """Orders that hold more, so that ranks wait less, are tried if the busiest rank waits for this
    part of the step: they can save only waiting."""
    mixed_idle: float = 0.05
    """Ranks may differ in their number of devices if equal ranks are idle for this part of the
    busiest rank's work: the times of stages are known about so well."""

    segments_of_kind: int = 3
    """How many segments of a kind make a stage, so that most of what is between two is included."""
    segments_stages: int = 24
    """The most such stages. With more kinds, some are joined, and share the time of their stage by
    their work."""
    segments_memory: float = 0.85
    """The part of a device's memory within which segments are planned first where memory binds."""
    segments_least_memory: float = 0.5
    """The part within which they are planned next."""
    segments_tolerance: float = 0.02
    """The part by which segments may take longer than the best: each stage is planned later."""
    stages_tolerance: float = 0.01
    """The part by which a stage may take longer than the best: the step is known no better."""
    stages_in_flight: int = 4
    """For how many numbers of microbatches in flight stages are planned that are equal
    otherwise."""
    sharing_rounds: int = 8
    """How often the stages of a device are replanned to fit together: a stage's memory at its own
    peak is not all in use at the device's."""

    rival_tries: int = 4
    """How often a plan of another structure is solved for with less memory, since its temporaries
    are over the limit."""
    rival_iterations: int = 20_000
    """Steps of the simplex method for one of them: twice those for 32 layers of a llama."""


_NOW: ContextVar[Policy] = ContextVar("policy")
_USUAL = Policy()


def policy_now() -> Policy:
    """The thresholds of new options: the usual ones, unless within `other_thresholds`."""
    return _NOW.get(_USUAL)


@contextmanager
def other_thresholds(**changed: float) -> Generator[Policy]:
    """Within it options have these thresholds: benchmarks show the use of each so."""
    policy = msgspec.structs.replace(policy_now(), **changed)
    token = _NOW.set(policy)
    try:
        yield policy
    finally:
        _NOW.reset(token)
