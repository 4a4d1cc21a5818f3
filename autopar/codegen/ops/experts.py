"""A layer of experts of which a rank has some of the experts, and all of the tokens or some of
them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import autopar.runtime.ops.experts_exchange  # noqa: F401 - defines the ops
from autopar.codegen.ops.peers import Emitters, Peers
from autopar.rules.experts import BACKWARD, EXCHANGE, FORWARD, first_input

_MESSAGES = 3


def _experts(p: Peers) -> list[fx.Node]:
    """Every rank has all tokens. It skips those of other ranks' experts, which add nothing."""
    at = first_input(p.node)
    here, _ = p.local(p.args[at + 1], p.shapes.local_inputs[at + 3][0])
    *args, _ = p.args
    args[at + 1] = here
    return _outputs(p, p(_op(p), *args, True))


def _experts_exchange(p: Peers) -> list[fx.Node]:
    """Tokens go to the ranks that have their experts."""
    *args, _ = p.args
    axis = p.takes_part("all_to_all", _MESSAGES)
    num_ranks = next(each.size for each in p.mesh if each.name == axis)
    return _outputs(p, p(_op(p, "_exchange"), *args, num_ranks, axis))


def _op(p: Peers, variant: str = "") -> Any:
    backward = "" if p.node.op == FORWARD else "_backward"
    return getattr(torch.ops.autopar, f"experts{variant}{backward}").default


def _outputs(p: Peers, call: fx.Node) -> list[fx.Node]:
    return [call] if p.node.op == FORWARD else p.items(call)


EXPERTS_EMITTERS: Emitters = {
    FORWARD: _experts,
    BACKWARD: _experts,
    f"{FORWARD} {EXCHANGE}": _experts_exchange,
    f"{BACKWARD} {EXCHANGE}": _experts_exchange,
}
