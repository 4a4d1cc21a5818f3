"""What the tracer relies on of torch's collectives, for every version that is supported."""

from __future__ import annotations

import inspect

import pytest
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable

from autopar.tracer.one_rank import DIFFERENTIABLE, IN_PLACE, OUT_OF_PLACE
from autopar.tracer.torch_private import functional_collectives


@pytest.mark.parametrize("name", IN_PLACE)
def test_collectives_of_a_script_have_a_group_and_may_be_asynchronous(name: str) -> None:
    given = inspect.signature(getattr(dist, name)).parameters
    assert "group" in given
    assert "async_op" in given or name == "all_gather_object"


@pytest.mark.parametrize("name", OUT_OF_PLACE)
def test_functional_collectives_are_given_a_tensor_first(name: str) -> None:
    given = [*inspect.signature(getattr(functional_collectives, name)).parameters]
    assert given[0] in ("self", "tensor")
    assert "group" in given or name == "wait_tensor"


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_differentiable_collectives_have_a_group(name: str) -> None:
    assert "group" in inspect.signature(getattr(differentiable, name)).parameters
