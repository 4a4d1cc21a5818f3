"""Any plan that may be in a file, for hypothesis."""

from __future__ import annotations

from typing import get_args, get_type_hints

import msgspec
from hypothesis import strategies as st

from autopar.plans.estimates import (
    CollectiveTotal,
    Held,
    Memory,
    MemoryCurve,
    OpTotal,
    StageEstimates,
    of_one_stage,
)
from autopar.plans.order import OPTIMIZER, Run
from autopar.plans.plan import SCHEMA_VERSION, Plan
from autopar.plans.provenance import CandidateOutcome, OutcomeKind, Provenance
from autopar.plans.structure import MeshAxis, Param, Stage, Structure
from tests.report.plans import two_axis_plan

_names = st.text(st.characters(codec="utf-8"), max_size=12)
_counts = st.integers(0, 2**62)
COUNTS = [name for name, kind in get_type_hints(StageEstimates).items() if kind is int]


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any plan that may be in a file."""
    axes = draw(st.lists(_names, unique=True, max_size=3))
    mesh = tuple(MeshAxis(name, draw(st.integers(1, 8))) for name in axes)

    def param() -> Param:
        shape = tuple(draw(st.lists(st.integers(0, 64), max_size=3)))
        places = ["R", *(f"S({d})" for d in range(len(shape)))]
        storage, kept = (
            f"[{', '.join(draw(st.sampled_from(places)) for _ in mesh)}]" for _ in range(2)
        )
        return Param(shape, draw(st.sampled_from(["float32", "bfloat16"])), storage, kept)

    texts = st.lists(_names, max_size=3).map(tuple)
    pairs = st.lists(st.tuples(_names, _names), max_size=2).map(tuple)
    results = st.sampled_from(get_args(OutcomeKind))
    outcomes = st.builds(CandidateOutcome, _names, results, st.none() | _counts, _names)
    totals = st.builds(OpTotal, _names, _names, _names, *[_counts] * 5, pairs, pairs)
    sent = st.builds(CollectiveTotal, *[_names] * 3, *[_counts] * 3)
    ops = draw(st.dictionaries(_names, totals, max_size=4))
    sends = draw(st.dictionaries(_names, st.lists(sent, max_size=2).map(tuple), max_size=2))
    words = [f"{word} {k} {key}" for key, found in sends.items() for k in range(len(found))
             for word in ("start", "with", "wait", "cut")]  # fmt: skip
    items = st.lists(st.sampled_from([*ops, *words, OPTIMIZER]), max_size=5).map(tuple)
    peak_candidates = draw(st.lists(st.tuples(*[_counts] * 4), max_size=5))
    return Plan(
        SCHEMA_VERSION,
        Structure(
            model=draw(_names),
            fingerprint=draw(_names),
            cluster=draw(_names),
            optimizer=draw(_names),
            inputs=draw(texts),
            stages=(
                Stage(
                    axes=mesh,
                    params={n: param() for n in draw(st.lists(_names, unique=True, max_size=4))},
                    ops=draw(st.dictionaries(_names, _names, max_size=3)),
                    outputs=draw(st.dictionaries(_names, _names, max_size=3)),
                    routes=draw(st.dictionaries(_names, texts, max_size=3)),
                    replicated_unknown_ops=draw(texts),
                ),
            ),
        ),
        of_one_stage(
            msgspec.structs.replace(
                two_axis_plan().estimates.stages[0],
                **{name: draw(_counts) for name in COUNTS},
                memory=draw(st.builds(Memory, *[_counts] * 6)),
                collectives=tuple(draw(st.lists(sent, max_size=3))),
                ops=ops,
                sends=sends,
                order=draw(
                    st.lists(st.builds(Run, st.integers(1, 9), items), max_size=3).map(tuple)
                ),
                memory_curve=MemoryCurve(*(zip(*peak_candidates) if peak_candidates else ())),
                peak_holders=tuple(
                    draw(st.lists(st.builds(Held, *[_names] * 3, *[_counts] * 2), max_size=2))
                ),
            )
        ),
        Provenance(
            *(draw(_names) for _ in range(4)),
            *(draw(_counts) for _ in range(3)),
            candidates=tuple(draw(st.lists(outcomes, max_size=3))),
            imposed=draw(texts),
        ),
    )
