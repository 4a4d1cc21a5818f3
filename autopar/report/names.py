"""Names and keys of a plan as people read them: nothing a terminal would obey, nothing endless."""

from __future__ import annotations

from collections.abc import Container, Sequence

from autopar.plans.estimates import StageEstimates

MAX_NAME = 160
WHOLE_MODEL = "(model)"
PARAM = "param:"
"""Before the name of a parameter, in its key."""


def clean(name: str, longest: int = MAX_NAME) -> str:
    """`name` escaped, and cut to `longest` characters: names come from files that others made."""
    return escape(name if len(name) <= longest else f"{name[: longest - 1]}…")


def escape(text: str) -> str:
    """`text` with what is not printable (control, format, odd spaces) as escapes (`\\x1b`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def short_op(op: str) -> str:
    """`mm` of `aten.mm.default`."""
    return "".join(op.split(".")[1:2]) or op


def stages_text(stages: Sequence[int]) -> str:
    """`stage 1`; `stages 0, 2`."""
    return f"stage{'s' * (len(stages) > 1)} {', '.join(map(str, stages))}"


def tensor_name(estimates: StageEstimates, key: str) -> str:
    """In words, the tensor with the key that is sent: a parameter's pattern, or the module and op
    that make it. Behind the tensor, a key may have the phase and a number of its path."""
    root = key.partition("@")[0]
    if root.startswith(PARAM):
        return root.removeprefix(PARAM)
    op = estimates.ops.get(maker(key, estimates.ops))
    return root if op is None else f"{op.module or WHOLE_MODEL}: {short_op(op.op)}"


def maker(key: str, ops: Container[str]) -> str:
    """The key in `ops` of what makes the tensor of `key`; empty for what no op makes."""
    base = key.partition("@")[0]
    for candidate in (base, base.rpartition(".")[0]):
        if candidate in ops:
            return candidate
    return ""


def op_place(key: str) -> tuple[str, str]:
    """(`layers.*.mlp forward`, `mm.0`) of `layers.*.mlp:forward:mm.0`."""
    module, colon, rest = key.partition(":")
    phase, second, op = rest.partition(":")
    return (f"{module or WHOLE_MODEL} {phase}", op) if colon and second else (key, "")


def tensor_place(key: str) -> tuple[str, str]:
    """The same for the key of a tensor, which may be that of a placeholder (`param:wte.weight`) and
    say in what phase it is used (`...@backward`)."""
    base, _, use = key.partition("@")
    place, name = op_place(base)
    if not name:
        place, _, name = base.partition(":")
    return place, f"{name} (for {use})".strip() if use else name
