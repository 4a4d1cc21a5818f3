"""By op, the function that writes an op whose ranks communicate.

What it sends, and in which order, is read from its record, by which it was priced. To add an op,
write a function in the file of the same name as the one with its record.
"""

from __future__ import annotations

from torch import fx

from autopar.codegen.ops.attention import ATTENTION_EMITTERS
from autopar.codegen.ops.embedding import EMBEDDING_EMITTERS
from autopar.codegen.ops.experts import EXPERTS_EMITTERS
from autopar.codegen.ops.loss import CHUNKED_LOSS_EMITTERS, LOSS_EMITTERS
from autopar.codegen.ops.norm import NORM_EMITTERS
from autopar.codegen.ops.peers import Emitters, Peers
from autopar.codegen.ops.softmax import SOFTMAX_EMITTERS
from autopar.codegen.ops.zigzag import ZIGZAG_EMITTERS
from autopar.rules.work import joint_factors

EMITTERS: Emitters = {
    **ATTENTION_EMITTERS,
    **CHUNKED_LOSS_EMITTERS,
    **EXPERTS_EMITTERS,
    **EMBEDDING_EMITTERS,
    **LOSS_EMITTERS,
    **NORM_EMITTERS,
    **SOFTMAX_EMITTERS,
    **ZIGZAG_EMITTERS,
}


def emit(p: Peers) -> list[fx.Node]:
    """The local outputs of `p.node`, in order."""
    joint = (name for _, name in joint_factors(p.node, p.choice))
    outputs = EMITTERS[" ".join((p.node.op, *joint))](p)
    p.check_all_sent()
    return outputs
