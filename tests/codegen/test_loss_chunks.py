"""Losses in chunks, of rows that are whole or split over ranks and turns, are eager's, and so is
every gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import msgspec
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.errors import LossChunksError
from autopar.ir.graph import Graph
from autopar.ir.own_ops import (
    CHUNKED,
    LINEAR,
    LINEAR_BACKWARD,
    SCORES,
    SCORES_BACKWARD,
    is_optional,
    original_key,
)
from autopar.ir.passes.loss_chunks import in_loss_chunks
from autopar.ir.passes.losses import heads_of
from autopar.ir.passes.recompute import with_recompute
from autopar.rules.notation import Call, TensorShape
from autopar.rules.table import rule_for
from autopar.runtime.ops.chunked_loss import ELSEWHERE, linear_nll, scores_nll, scores_nll_rows
from autopar.runtime.simulator.spmd import train_step
from autopar.tracer import trace
from tests.codegen.meshes import mesh
from tests.codegen.models import Case, case, make_case
from tests.codegen.random_plans import random_plan
from tests.codegen.test_random_plans import difference
from tests.layouts import program_of
from tests.redone import redecided

TOKENS, WIDTH, CLASSES, IGNORED = 24, 8, 16, 5


class Language(nn.Module):
    """A table, a layer and a head, which may be the table, under `loss`."""

    def __init__(self, loss: Callable[..., Tensor], *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.table.weight
        self.loss = loss

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.layer(self.table(ids)))
        return self.loss(self.head(x).flatten(0, -2), targets.flatten(), x)


def mean(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets, ignore_index=IGNORED)


def summed(scores: Tensor, targets: Tensor, x: Tensor) -> Tensor:
    """With another term, and a loss that is not in proportion to it."""
    total = functional.cross_entropy(scores, targets, reduction="sum", ignore_index=IGNORED)
    return total / 7 + x.square().mean()


@cache
def language(name: str) -> Case:
    """`mean`, `summed` or `tied`, in float64, on a batch in which few rows of some ranks count."""
    torch.manual_seed(0)
    model = Language(summed if name == "summed" else mean, tied=name == "tied").double()
    ids, targets = (torch.randint(0, CLASSES, (4, TOKENS // 4)) for _ in range(2))
    targets[0, :5] = IGNORED
    targets[2] = IGNORED
    return make_case(model, {"ids": ids, "targets": targets})


CASES = {"mean": 1e-9, "summed": 1e-9, "tied": 1e-9, "llama": 1e-5, "gpt2": 1e-5}


def found(name: str) -> Case:
    return case(name) if name in ("llama", "gpt2") else language(name)


def check(of: Case, on: Sequence[int], seed: int, tolerance: float, **how: object) -> None:
    """A random plan, with the loss in chunks, computes what eager does."""
    graph, laid = of.traced.graph, mesh(*on)
    plan = random_plan(graph, laid, seed, **how)  # type: ignore[arg-type]
    program = program_of(of.traced, plan.structure.only, graph)
    step = train_step(program, laid, graph, plan.structure.only, of.tensors, tolerance=tolerance)
    assert difference(step.outputs["loss:0"], of.loss) <= tolerance
    assert step.gradients.keys() == of.gradients.keys()
    for name, expected in of.gradients.items():
        assert difference(step.gradients[name], expected) <= tolerance, name
    for position, expected in of.outputs.items():
        assert difference(step.outputs[f"detached:{position}"], expected) <= tolerance


@pytest.mark.breadth(7)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [(), (2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_eager(name: str, sizes: Sequence[int], seed: int) -> None:
    check(found(name), sizes, seed, CASES[name], loss_chunks=(2, 3, 50)[seed])


@pytest.mark.breadth(4)
@pytest.mark.parametrize("sizes", [(), (2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_in_microbatches_too(name: str, sizes: Sequence[int]) -> None:
    check(found(name), sizes, 3, CASES[name], loss_chunks=3, microbatches=2)


@pytest.mark.breadth(4)
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_cut_vocabulary(name: str, sizes: Sequence[int]) -> None:
    """Each rank has some of the classes."""
    cut = ",".join("v" * len(sizes))
    pins = {".*_nll.0": cut, ".*_nll_backward.0": cut}
    check(found(name), sizes, 4, CASES[name], loss_chunks=3, pins=pins)


def test_with_all_else_made_again() -> None:
    of = found("llama")
    chunked = in_loss_chunks(of.traced.graph, 3)
    options = [n for n in with_recompute(chunked, None).nodes if is_optional(n) and not n.view]
    keys = tuple(sorted({original_key(node.key) for node in options}))
    assert keys and not any("_nll" in key for key in keys)
    plan = random_plan(with_recompute(chunked, keys), mesh(2), 0, loss_chunks=1)
    structure = redecided(
        plan.structure,
        recompute=keys,
        loss_chunks=3,
    )
    plan = msgspec.structs.replace(plan, structure=structure)
    program = program_of(of.traced, plan.structure.only)
    step = train_step(program, mesh(2), of.traced.graph, structure.only, of.tensors, tolerance=1e-5)
    for name, expected in of.gradients.items():
        assert difference(step.gradients[name], expected) <= 1e-5, name


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes if node.op in CHUNKED]


def test_scores_are_made_whole_only_where_something_else_reads_them() -> None:
    whole, chunked = (in_loss_chunks(found("tied").traced.graph, n) for n in (1, 2))
    assert ops(chunked) == [LINEAR, LINEAR_BACKWARD] and not ops(whole)
    (head,) = heads_of(whole)
    parts = head.matmul.outputs[0].parts
    assert [t for n in whole.nodes for t in n.outputs if t.parts == parts]
    assert not [t for n in chunked.nodes for t in n.outputs if t.parts == parts]
    returned = in_loss_chunks(case("llama").traced.graph, 2)
    assert ops(returned) == [SCORES, SCORES_BACKWARD]
    (head,) = heads_of(case("llama").traced.graph)
    parts = head.matmul.outputs[0].parts
    made = [n for n in returned.nodes if not n.view and any(t.parts == parts for t in n.outputs)]
    assert [node.name for node in made] == [head.matmul.name]


@pytest.mark.parametrize("name", CASES)
def test_what_is_sharded_is_what_the_rules_say(name: str) -> None:
    """The graph's ops are written without the tracer, which asks the rules."""
    graph = in_loss_chunks(found(name).traced.graph, 2)
    for node in graph.nodes:
        if node.op in CHUNKED:
            inputs, outputs = (
                tuple(TensorShape(t.shape, t.dtype) for t in types)
                for types in (graph.input_types(node), node.outputs)
            )
            args = (*node.args[:-2], 1, 1)
            places = {ref: k for k, ref in enumerate(node.inputs)}
            given = tuple(type(a)(places[a]) if a in places else a for a in args)
            rule = rule_for(Call(node.op, given, (), inputs, outputs))
            assert rule is not None and rule.partial == node.partial
            for factor in node.factors:
                letter = factor.name.partition(".")[0]
                assert factor.type is rule.type_of(letter)
                assert factor.positional == (letter in rule.positional)
                for slots, dims in ((factor.inputs, rule.inputs), (factor.outputs, rule.outputs)):
                    there = [None if slot is None else slot[0] for slot in slots]
                    asked = [dim.index((letter,)) if (letter,) in dim else None for dim in dims]
                    assert there == asked
            assert {f.name.partition(".")[0] for f in node.factors} == set(rule.letters)


def weighted(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets, torch.ones(CLASSES, dtype=scores.dtype))


def each(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets, reduction="none").square().mean()


def smoothed(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets, label_smoothing=0.1)


def scaled(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores * 0.5, targets)


def pulled(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    """Another term has gradients of the scores."""
    return functional.cross_entropy(scores, targets) + scores.logsumexp(-1).square().mean()


def twice(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    return functional.cross_entropy(scores, targets) + functional.nll_loss(
        scores.log_softmax(-1), targets.flip(0)
    )


def halves(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    """The rows of scores are not all there."""
    return functional.cross_entropy(scores[1:], targets[1:])


def of_itself(scores: Tensor, targets: Tensor, _: Tensor) -> Tensor:
    """The loss reads what the softmax makes beside."""
    logs = scores.log_softmax(-1)
    return functional.nll_loss(logs, targets) + logs.exp().square().mean()


@pytest.mark.parametrize(
    "loss", [weighted, each, smoothed, scaled, pulled, twice, halves, of_itself]
)
def test_what_is_no_head_stays_whole(loss: Callable[..., Tensor]) -> None:
    ids, targets = (torch.randint(0, CLASSES, (TOKENS,)) for _ in range(2))
    graph = trace(Language(loss).double(), (ids, targets), {}).graph
    assert not heads_of(graph)
    with pytest.raises(LossChunksError, match="no loss that can be worked on in chunks"):
        in_loss_chunks(graph, 2)


@pytest.mark.parametrize("frozen", ["head", "all but the head", "all"])
def test_a_head_without_a_gradient_stays_whole(frozen: str) -> None:
    model = Language(mean)
    for name, parameter in model.named_parameters():
        is_head = name.startswith("head")
        parameter.requires_grad = frozen == ("all but the head" if is_head else "head")
    ids, targets = (torch.randint(0, CLASSES, (TOKENS,)) for _ in range(2))
    assert not heads_of(trace(model, (ids, targets), {}).graph)


def cast(*dtypes: torch.dtype) -> Callable[..., Tensor]:
    """The loss of scores that are cast before it."""

    def loss(scores: Tensor, targets: Tensor, x: Tensor) -> Tensor:
        for dtype in dtypes:
            scores = scores.to(dtype)
        return mean(scores, targets, x)

    return loss


@pytest.mark.parametrize(
    ("of", "dtypes", "is_head"),
    [
        (torch.float32, (), True),
        (torch.float64, (), True),
        (torch.float16, (torch.float32,), True),
        (torch.bfloat16, (torch.float32,), True),
        (torch.float32, (torch.float64,), False),
        (torch.float64, (torch.float32,), False),
        (torch.bfloat16, (torch.float64,), False),
        (torch.bfloat16, (), False),
        (torch.float32, (torch.bfloat16, torch.float32), False),
        (torch.float64, (torch.float32, torch.float64), False),
        (torch.bfloat16, (torch.float16, torch.float32), False),
    ],
    ids=str,
)
def test_a_cast_that_changes_numbers_is_kept(
    of: torch.dtype, dtypes: Sequence[torch.dtype], is_head: bool
) -> None:
    ids, targets = (torch.randint(0, CLASSES, (TOKENS,)) for _ in range(2))
    graph = trace(Language(cast(*dtypes)).to(of), (ids, targets), {}).graph
    assert bool(heads_of(graph)) is is_head


class Turned(Language):
    """Multiplies by a table that is turned by hand."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.layer(self.table(ids))).flatten(0, -2)
        return self.loss(x @ self.table.weight.t(), targets.flatten(), x)


@pytest.mark.parametrize("sizes", [(), (2, 2)], ids=str)
def test_a_weight_that_is_turned(sizes: Sequence[int]) -> None:
    torch.manual_seed(0)
    ids, targets = (torch.randint(0, CLASSES, (4, TOKENS // 4)) for _ in range(2))
    del (model := Turned(mean).double()).head
    of = make_case(model, {"ids": ids, "targets": targets})
    assert len(heads_of(of.traced.graph)) == 1
    check(of, sizes, 0, 1e-9, loss_chunks=3)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_close_to_eager(dtype: torch.dtype, seed: int) -> None:
    """Scores in half precision, sums in float32."""

    def upcast(scores: Tensor, targets: Tensor, x: Tensor) -> Tensor:
        return mean(scores.float(), targets, x)

    torch.manual_seed(seed)
    ids, targets = (torch.randint(0, CLASSES, (4, TOKENS // 4)) for _ in range(2))
    of = make_case(Language(upcast, tied=True).to(dtype), {"ids": ids, "targets": targets})
    (head,) = heads_of(of.traced.graph)
    assert head.loss.outputs[0].dtype == "float32"
    check(of, (2,), seed, 8 * torch.finfo(dtype).eps, loss_chunks=2)


def test_a_rank_may_have_none_but_classes_that_are_minus_infinity() -> None:
    """What it adds to a row's sum is nothing, where NaN would spoil it."""
    scores = torch.full((4, 4), float("-inf"))
    rows, own = scores_nll_rows(scores, torch.tensor([0, 1, ELSEWHERE, -7]), -7, 2)
    assert rows.tolist() == [float("-inf")] * 4
    assert own.tolist() == [float("-inf")] * 2 + [0.0] * 2


def test_a_target_that_there_is_not_is_an_error() -> None:
    """It is no target of another rank, whatever number stands for those."""
    x, w, targets = torch.rand(4, 3), torch.rand(5, 3), torch.tensor([0, 1, -1, 2])
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        linear_nll(x, w, targets, -100, 2)
    with pytest.raises((RuntimeError, IndexError), match="out of bounds"):
        scores_nll(x @ w.t(), targets, -100, 2)
    linear_nll(x, w, targets, -1, 2)
