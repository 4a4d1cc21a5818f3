"""Keys of ops and of tensors as a person reads them."""

from __future__ import annotations

from autopar.report.costs import WHOLE_MODEL


def op_place(key: str) -> tuple[str, str]:
    """(`layers.*.mlp forward`, `mm.0`) of `layers.*.mlp:forward:mm.0`."""
    module, colon, rest = key.partition(":")
    phase, second, op = rest.partition(":")
    if not (colon and second):
        return key, ""
    return f"{module or WHOLE_MODEL} {phase}", op


def tensor_place(key: str) -> tuple[str, str]:
    """The same for the key of a tensor, which may be that of a placeholder (`param:wte.weight`) and
    say in what phase it is used (`...@backward`)."""
    base, _, use = key.partition("@")
    place, name = op_place(base)
    if not name:
        place, _, name = base.partition(":")
    return place, f"{name} (for {use})".strip() if use else name
