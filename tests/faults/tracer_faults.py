"""Faults in what the tracer makes of a model, and in the atoms of its dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.ir.graph import Node, Phase
from autopar.tracer import (
    attention,
    capture,
    decomposed,
    expand,
    find,
    normalize,
    periods,
    torch_private,
)
from autopar.tracer.fx_graphs import outputs_of, set_outputs
from tests.faults.table import by_test, fault, retraced
from tests.runtime.test_random import UNUSED, test_what_is_drawn_and_not_used_moves_no_mask
from tests.tracer.deep_models import causal_masks, plain, two_masks
from tests.tracer.misleading_models import last_by_its_number
from tests.tracer.test_runs import (
    test_a_short_trace_is_the_whole_one,
    test_blocks_that_differ_are_all_traced,
)
from tests.tracer.test_trace import test_frozen_parameters_have_no_gradient

aten = torch.ops.aten
Patch = pytest.MonkeyPatch


@fault(retraced("vocabulary"))
def gradient_of_a_tied_weight_taken_once(patch: Patch) -> None:
    """Of the gradients that a parameter of two names has, the first is returned."""
    original = normalize.merge_tied_parameters

    def first(gm: fx.GraphModule, tied: dict[str, str]) -> fx.GraphModule:
        found = original(gm, tied)
        for node in gm.graph.nodes:
            added = node.target is aten.add.Tensor and node.meta.get("is_gradient_acc")
            if added and any(user.op == "output" for user in node.users):
                node.replace_all_uses_with(node.args[0])
        return found

    patch.setattr(normalize, "merge_tied_parameters", first)


@fault(by_test(test_frozen_parameters_have_no_gradient))
def frozen_parameter_given_a_gradient(patch: Patch) -> None:
    def trained(x: Tensor, mode: torch_private.FakeTensorMode) -> Tensor:
        with mode:
            fake = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
            return nn.Parameter(fake, True) if isinstance(x, nn.Parameter) else fake

    patch.setattr(capture, "fake_tensor", trained)


@fault(retraced("vocabulary"))
def mean_loss_whose_gradient_is_a_sum(patch: Patch) -> None:
    patch.setattr(normalize, "_split_backward", lambda node: node.update_arg(4, normalize._SUM))


@fault(retraced("states"))
def dropout_that_does_not_scale(patch: Patch) -> None:
    original = decomposed._before

    def unscaled(node: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        if target is aten.mul.Tensor and isinstance(args[1], float):
            args = (args[0], 1.0)
        return original(node, target, args, value)

    patch.setattr(decomposed, "_before", unscaled)


@fault(retraced("layers"))
def bias_lost_when_a_product_is_split(patch: Patch) -> None:
    original = decomposed._before

    def without_bias(node: fx.Node, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
        if target is aten.add.Tensor:
            args = (args[0], 0)
        return original(node, target, args, value)

    patch.setattr(decomposed, "_before", without_bias)


@fault(by_test(test_blocks_that_differ_are_all_traced, build=last_by_its_number))
def short_model_not_compared_with_the_whole(patch: Patch) -> None:
    patch.setattr(find, "same_around", lambda whole, short: True)


@fault(by_test(test_a_short_trace_is_the_whole_one, build=two_masks))
def blocks_compared_by_what_they_call_alone(patch: Patch) -> None:
    patch.setattr(find, "repeats", lambda stream: True)


@fault(by_test(test_a_short_trace_is_the_whole_one, build=plain))
def copies_of_a_block_that_read_the_first_one(patch: Patch) -> None:
    original = periods.Periods.reads

    def reads(self: periods.Periods, node: Node, copy: int) -> list[periods.BlockPlace]:
        found = original(self, node, copy)
        return [(i, min(c, 1)) for i, c in found] if node.phase is Phase.FORWARD else found

    patch.setattr(periods.Periods, "reads", reads)


@fault(by_test(test_a_short_trace_is_the_whole_one, build=causal_masks))
def dims_of_a_block_shared_by_its_copies(patch: Patch) -> None:
    patch.setattr(expand._Atoms, "_copy", lambda self, atom, copy: atom)


@fault(by_test(test_what_is_drawn_and_not_used_moves_no_mask, UNUSED["rand_like"]))
def random_op_dropped_that_nothing_reads(patch: Patch) -> None:
    patch.setattr(normalize, "is_random", lambda _: False)


def without_last(patch: Patch, kind: type) -> None:
    """Of the outputs of the joint graph that `kind` describes, the last is not returned."""
    original = normalize.keep_known_outputs

    def kept(gm: fx.GraphModule, external: frozenset[str]) -> fx.GraphModule:
        pairs = list(zip(*outputs_of(original(gm, external)), strict=True))
        last = max(k for k, (_, desc) in enumerate(pairs) if isinstance(desc, kind))
        set_outputs(gm, pairs[:last] + pairs[last + 1 :])
        return gm

    patch.setattr(normalize, "keep_known_outputs", kept)


@fault(retraced("states"))
def gradient_that_is_not_returned(patch: Patch) -> None:
    without_last(patch, torch_private.GradAOTOutput)


@fault(retraced("states"))
def new_value_of_a_buffer_that_is_not_returned(patch: Patch) -> None:
    without_last(patch, torch_private.InputMutationAOTOutput)


@fault(retraced("attention"))
def attention_whose_mask_is_lost(patch: Patch) -> None:
    original = attention.sdpa
    patch.setattr(
        attention,
        "sdpa",
        lambda q, k, v, mask, is_causal, scale: original(q, k, v, None, False, scale),
    )
