"""Draws of ops that rearrange elements: views, joins, pieces, indices."""

from __future__ import annotations

from math import prod

from tests.fuzz.drawing import MAX_NUMEL, Drawing


def transpose(d: Drawing) -> None:
    name = d.value(2)
    if d[name].dim() == 2 and d.chance(50):
        d.emit(f"{name}.t()")
    else:
        d.emit(f"{name}.transpose({d.dim(name)}, {d.dim(name)})")


def permute(d: Drawing) -> None:
    name = d.value(2)
    d.emit(f"{name}.permute({d.draw_order(range(d[name].dim()))})")


def merge(d: Drawing) -> None:
    name = d.value(2)
    shape = d.shape(name)
    at = d.number(0, len(shape) - 2)
    d.emit(f"{name}.reshape({[*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]})")


def unmerge(d: Drawing) -> None:
    name = d.value(1, 3)
    shape, dim = d.shape(name), d.dim(name)
    factors = [k for k in range(2, shape[dim]) if shape[dim] % k == 0] or [1, shape[dim]]
    outer = d.pick(factors)
    d.emit(f"{name}.reshape({[*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :]]})")


def refold(d: Drawing) -> None:
    """Shapes with no common factors: 4 x 3 to 6 x 2."""
    name = d.value(1, 3)
    total = d[name].numel()
    first = d.pick([k for k in range(1, total + 1) if total % k == 0])
    d.emit(f"{name}.reshape({first}, {total // first})")


def flat(d: Drawing) -> None:
    d.emit(f"{d.value(1)}.{d.pick(('flatten()', 'flatten(0, -1)', 'reshape(-1)'))}")


def unsqueeze(d: Drawing) -> None:
    name = d.value(0, 3)
    d.emit(f"{name}.unsqueeze({d.number(-1, d[name].dim())})")


def squeeze(d: Drawing) -> None:
    name = d.value(1, 4, lambda x: 1 in x.shape)
    if name is not None:
        where = [k for k, size in enumerate(d.shape(name)) if size == 1]
        d.emit(f"{name}.squeeze({d.pick(['', *map(str, where)])})")


def expand(d: Drawing) -> None:
    name = d.value(0, 3)
    shape = [d.size() if size == 1 and d.chance(70) else size for size in d.shape(name)]
    if d.chance(50) and prod(shape) <= MAX_NUMEL // 8:
        shape = [d.size(), *shape]
    d.emit(f"{name}.expand({shape})")


def repeat(d: Drawing) -> None:
    name = d.value(1, 3)
    counts = [d.pick((1, 1, 2, 3)) for _ in d.shape(name)]
    if prod(counts) <= 6:
        d.emit(f"{name}.repeat({counts})")


def interleave(d: Drawing) -> None:
    name = d.value(1, 3)
    d.emit(f"{name}.repeat_interleave(2, {d.dim(name)})")


def cat(d: Drawing) -> None:
    """With itself changed, with a value that fits, with a parameter."""
    name = d.value(1)
    shape, dim = d.shape(name), d.dim(name)
    rest = [size for k, size in enumerate(shape) if k != dim]

    def fits(x) -> bool:
        return x.dim() == len(shape) and [s for k, s in enumerate(x.shape) if k != dim] == rest

    parts = [name]
    for _ in range(d.number(1, 2)):
        how = d.number(0, 2)
        other = d.value(1, 4, fits) if how == 0 else None
        if other is not None:
            parts.append(other)
        elif how == 1:
            parts.append(f"torch.tanh({name})")
        else:
            parts.append(d.parameter(*shape[:dim], d.size(), *shape[dim + 1 :]))
    d.emit(f"torch.cat([{', '.join(parts)}], {dim if d.chance(50) else dim - len(shape)})")


def stack(d: Drawing) -> None:
    name = d.value(0, 3)
    other = d.value(0, 3, lambda x: tuple(x.shape) == d.shape(name))
    d.emit(f"torch.stack([{name}, {other}], {d.number(-1, d[name].dim())})")


def split(d: Drawing) -> None:
    """Pieces, equal or not, of which some are used."""
    name = d.value(1)
    dim = d.dim(name)
    size = d.shape(name)[dim]
    how = d.number(0, 2)
    if how == 0:
        pieces = f"{name}.chunk({d.pick((2, 3))}, {dim})"
    elif how == 1:
        pieces = f"{name}.split({d.number(1, size)}, {dim})"
    elif size > 1:
        first = d.number(1, size - 1)
        pieces = f"{name}.split([{first}, {size - first}], {dim})"
    else:
        pieces = f"{name}.unbind({dim})"
    held = d.fresh("t")
    d.run(f"{held} = {pieces}")
    count = len(d.env[held])
    if count > 1 and d.chance(50):
        d.emit(f"torch.cat([{held}[-1], {held}[0]], {dim})" if "unbind" not in pieces
               else f"{held}[0] + {held}[-1]")  # fmt: skip
    else:
        d.emit(f"{held}[{d.number(0, count - 1)}]")


def slice_(d: Drawing) -> None:
    name = d.value(1)
    dim = d.dim(name)
    size = d.shape(name)[dim]
    start = d.number(0, size - 1)
    end = d.number(start + 1, size)
    how = d.pick((f"{start}:{end}", f"{start}:{end}", f"{size // 2}:", f":{size // 2 or 1}", "::2",
                  f"-{size - start}:"))  # fmt: skip
    d.emit(f"{name}[{':, ' * dim}{how}]")


def select(d: Drawing) -> None:
    name = d.value(1)
    dim = d.dim(name)
    size = d.shape(name)[dim]
    d.emit(f"{name}.select({dim}, {d.number(-size, size - 1)})")


def narrow(d: Drawing) -> None:
    name = d.value(1)
    dim = d.dim(name)
    size = d.shape(name)[dim]
    start = d.number(0, size - 1)
    d.emit(f"{name}.narrow({dim}, {start}, {d.number(1, size - start)})")


def pad(d: Drawing) -> None:
    name = d.value(1)
    pads = [d.number(0, 2) for _ in range(2 * d.number(1, min(2, d[name].dim())))]
    value = d.pick(("", ", value=0.5"))
    d.emit(f"F.pad({name}, {pads}{value})")


def turned(d: Drawing) -> None:
    name = d.value(1)
    dim = d.dim(name)
    d.emit(f"{name}.{d.pick((f'flip({dim})', f'roll(1, {dim})', f'roll(-2, {dim})'))}")


def triangle(d: Drawing) -> None:
    d.emit(f"{d.value(2)}.{d.pick(('tril()', 'triu(1)', 'tril(-1)'))}")


def diagonal(d: Drawing) -> None:
    d.emit(f"{d.value(2)}.diagonal(dim1=-2, dim2=-1)")


def index(d: Drawing) -> None:
    """Rows by number, of one dim or of two."""
    name = d.value(1, 3)
    dim = d.dim(name)
    size = d.shape(name)[dim]
    how = d.number(0, 3)
    if how == 0:
        d.emit(f"{name}.index_select({dim}, {d.integers(size, d.size())})")
    elif how == 1:
        d.emit(f"{name}[{':, ' * dim}{d.integers(size, d.size())}]")
    elif how == 2:
        counts = list(d.shape(name))
        counts[dim] = d.number(1, size)
        d.emit(f"{name}.gather({dim}, {d.integers(size, *counts)})")
    elif d[name].dim() > 1:
        count = d.size()
        rows, columns = (d.integers(s, count) for s in d.shape(name)[:2])
        d.emit(f"{name}[{rows}, {columns}]")


def scatter(d: Drawing) -> None:
    name = d.value(1, 2)
    dim = d.dim(name)
    counts = list(d.shape(name))
    into = d.size()
    target = [*counts[:dim], into, *counts[dim + 1 :]]
    at = d.integers(into, *counts)
    d.emit(f"torch.zeros({target}, dtype=torch.float64).scatter_add({dim}, {at}, {name})")


OPS = (
    transpose, permute, merge, merge, unmerge, unmerge, refold, flat, unsqueeze, squeeze, expand,
    repeat, interleave, cat, cat, stack, split, split, slice_, slice_, select, narrow, pad, turned,
    triangle, diagonal, index, index, scatter,
)  # fmt: skip
