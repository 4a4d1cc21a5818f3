"""One record per op, and no other table of ops."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import autopar
from autopar.codegen.ops.table import EMITTERS
from autopar.errors import TraceError
from autopar.ir.graph import FactorType
from autopar.rules import work
from autopar.rules.notation import parse_rule
from autopar.rules.op import Op
from autopar.rules.table import FAMILIES, OPS, records
from autopar.tracer import trace

ROOT = Path(autopar.__file__).parent
_OP = re.compile(r"(aten|autopar|transformers)\.\w+\.(default|[A-Za-z]\w*)( \w+)?")

NAMED_ELSEWHERE = {
    "codegen/passes.py": "the addition that a matmul takes in again, and pairs of ops that cancel",
    "ir/passes/losses.py": "the ops of a head and its loss, and losses that count targets",
    "ir/own_ops.py": "the ops that take their place",
    "ir/passes/stage_assignment.py": "sums of gradients, whose terms stages may add up apart",
    "ir/passes/microbatch_states.py": "zeros, a term of any sum, and what reads no values",
    "runtime/module/changes.py": "what a script may do with parameters: eager, not planned",
    "runtime/process/part_tensors.py": "norms of lists of tensors, some of them on no rank: eager",
    "runtime/process/proven.py": "what DTensor makes of shards: eager, not planned",
    "runtime/ops/gates.py": "activations and the ops that differentiate them",
    "runtime/ops/host_copies.py": "its own ops, as codegen puts them into graphs",
    "runtime/program/sharded_ops.py": "what a user may do with outputs in shards: eager",
    "runtime/simulator/eager_step.py": "which kernels of eager take sums in float32",
    "tracer/normalize.py": "losses whose mean becomes a sum before there is a graph to plan",
    "tracer/decomposed.py": "views that are copied and norms that are split, before planning",
}
"""Files that name ops, other than records and emitters, and for what."""


def test_no_op_has_two_records() -> None:
    with pytest.raises(ValueError, match=r"aten\.mm\.default has two records"):
        records((*FAMILIES, ((Op("m k, k n -> m n"), "mm"),)))


def test_what_is_emitted_is_in_the_records() -> None:
    named = {key.split()[0] for key in EMITTERS}
    assert named <= set(OPS)
    joint = {f"{op} {name}" for op, record in OPS.items() for name in record.joint}
    assert joint == {key for key in EMITTERS if " " in key}
    assert {op for op, record in OPS.items() if record.row_reductions} <= set(EMITTERS)


def test_records_and_emitters_are_the_only_tables_of_ops() -> None:
    assignment = {*(ROOT / "rules").glob("*.py"), *(ROOT / "codegen" / "ops").glob("*.py")}
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if path not in assignment and _names_ops(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(NAMED_ELSEWHERE)


def _names_ops(tree: ast.Module) -> bool:
    """Whether a file has an op's name as text, or a table of the ops themselves."""
    texts = (n.value for n in ast.walk(tree) if isinstance(n, ast.Constant))
    if any(isinstance(t, str) and _OP.fullmatch(t) and _is_op(t) for t in texts):
        return True
    assigned = (n.value for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign) and n.value)
    items = (n for value in assigned for n in ast.walk(value) if isinstance(n, ast.Attribute))
    return any(_OP.fullmatch(ast.unparse(n).removeprefix("torch.ops.")) for n in items)


def _is_op(text: str) -> bool:
    namespace, packet, overload = text.split()[0].split(".")
    return text in OPS or hasattr(getattr(getattr(torch.ops, namespace), packet, 0), overload)


def test_an_op_whose_record_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(OPS, "aten.mm.default")
    with pytest.raises(TraceError, match=r"aten\.mm\.default.*has no sharding rule"):
        trace(nn.Linear(4, 4, bias=False), (torch.zeros(2, 4),), strict=True)
    assert not work.is_contraction("aten.mm.default")


def test_letters_have_types() -> None:
    rule = parse_rule("v# b n s@ d!, k n -> b n s@ d!")
    assert {letter: rule.type_of(letter) for letter in rule.letters} == {
        "v": FactorType.REDUCTION,
        "b": FactorType.PASS_THROUGH,
        "n": FactorType.PASS_THROUGH,
        "s": FactorType.PERMUTATION,
        "d": FactorType.NEEDS_REPLICATION,
        "k": FactorType.REDUCTION,
    }
    assert rule.exchanged == {"v", "s"}
