"""What the search looks at, and when it stops: every threshold of it, with what chose it.
`benchmarks.policy` halves and doubles them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

import msgspec


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The thresholds of the search. A plan records those that it was found with. Where a
    measurement is named, it chose the value; what halving and doubling each does is in
    benchmarks/README.md."""

    refined_devices: int = 64
    """Meshes of three axes are tried unasked from so many devices on: on eight, one of them takes
    several times as long as all others together, and little is to be gained."""
    refined_within: float = 0.05
    """A mesh of three axes is tried where the two of two axes that it refines have bounds no
    further above the best plan, as a part of it: it is better than the worse of them by at most 4 %
    on 8x8 H100 (ADR 43)."""
    refined_most: int = 3
    """How many of them are tried at most, those first that refine the best meshes."""
    refined_nodes: int = 1_000
    """With more nodes in a problem, as of a model whose many layers differ, none is tried unasked:
    a mesh of three axes takes as long as all others together."""
    refined_gain: float = 1e-3
    """By what part of the best plan those of three axes are to be better: as much the best may be
    above its own bound."""

    chunks_worth: int = 32
    """Chunks of the loss are tried where scores, and what is made of them, are this part of a
    device's memory or more: they cannot save more than that."""
    chunks_smallest: int = 64
    """A chunk is no smaller than this part of the memory."""
    chunks_rows: int = 256
    """A chunk has at least so many rows: products of fewer take longer."""
    chunks_tries: int = 3
    """How many numbers of chunks are tried at most, the most that are of use last."""
    chunks_step: int = 4
    """Each is so many times the one before."""
    chunks_wide_step: int = 8
    """The same where the last is more than 64."""

    hindered_ns: int = 10_000_000
    """Stages that nobody asked for are looked for where a step in one loses so much: to look takes
    seconds to minutes, and a step that loses less has hardly that to win in thousands of them."""
    prices_err: float = 0.1
    """Stages that nobody asked for are to win more than this part: of emulated clusters
    (`benchmarks.emulated`) those estimated to win 14 % took 3 to 9 % longer, and those estimated to
    win 15 % or more won."""

    microbatches_per_rank: int = 4
    """In how many microbatches for each rank pipelines are considered first: with fewer, ranks wait
    for a fifth of the step or more, and hold more."""
    launched_most: float = 0.1
    """In microbatches so small that launching them alone takes longer than this part of a step in
    one stage, pipelines are not considered first."""
    fewer_microbatches_gain: float = 1.5
    """By how much less ranks may work in fewer microbatches, where launches count and adding up
    gradients: in four stages 8 layers of Llama, 128 wide, keep a CPU busy for 402 ms in 16 of them,
    for 255 in 8 and for 178 in 4."""
    estimate_near: float = 1.03
    """The most that what is planned is estimated to take, in terms of the best that fits: what
    segments take is known to some parts in a hundred."""
    estimate_slack: float = 1.1
    """Up to so many times its estimate a pipeline is as expected, and is not planned again with
    other choices: mostly it is within 3 %; where memory binds hard, 13 were seen."""
    pipelines_planned: int = 3
    """Of how many shapes all stages are planned, at most, once there is a plan."""
    reordered_waits: float = 0.02
    """Orders in which more is held, so that ranks wait less, are tried where the busiest rank waits
    for this part of the step: waiting is all that they can save."""
    mixed_idle: float = 0.05
    """Ranks may differ in how many devices they have where those that do not are idle for this part
    of what the busiest works: that is about how well known it is what stages take."""

    segments_of_kind: int = 3
    """How many segments of a kind make a stage, so that most of what is between two is seen."""
    segments_stages: int = 24
    """How many such stages there are at most: with more kinds, some are taken together, and what
    that takes is shared by their work."""
    segments_memory: float = 0.85
    """Within which part of a device's memory segments are planned first where memory binds."""
    segments_least_memory: float = 0.5
    """Within which part they are planned next."""
    segments_tolerance: float = 0.02
    """By which part segments may take longer than they need: each stage is planned again."""
    stages_tolerance: float = 0.01
    """By which part a stage may take longer than it need: the step is known no better."""
    stages_in_flight: int = 4
    """For how many numbers of microbatches in flight stages are planned that are equal but for
    that."""
    sharing_rounds: int = 8
    """How often the stages of a device are planned anew to fit together: what one gives up at its
    fullest moment is not all given up at the device's."""

    rival_tries: int = 4
    """How often a plan of another structure is solved for with less memory, as its temporaries
    break the limit."""
    rival_iterations: int = 20_000
    """Steps of the simplex method for one of them: twice what 32 layers of a llama take."""


_NOW: ContextVar[Policy] = ContextVar("policy")
_USUAL = Policy()


def policy_now() -> Policy:
    """The thresholds of options that are made now: the usual ones, unless within
    `other_thresholds`."""
    return _NOW.get(_USUAL)


@contextmanager
def other_thresholds(**changed: float) -> Generator[Policy]:
    """Within it options have these thresholds: benchmarks show what each is good for so."""
    policy = msgspec.structs.replace(policy_now(), **changed)
    token = _NOW.set(policy)
    try:
        yield policy
    finally:
        _NOW.reset(token)
