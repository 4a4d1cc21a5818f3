"""Draws of what has state: in-place ops, buffers, random numbers; and of constants."""

from __future__ import annotations

from tests.fuzz.drawing import Drawing

IN_PLACE = (
    "{0}.add_({1})", "{0}.mul_({1})", "{0}.sub_({1}, alpha=0.5)", "{0}.mul_(0.5)",
    "{0}.masked_fill_({1} > 0, 0.2)", "{0}.clamp_(-1, 1)", "{0}.add_(1)", "{0}.neg_()",
    "{0} *= {1}", "{0} += {1}",
)  # fmt: skip

LAST = ("{0}.relu_()", "{0}.tanh_()", "{0}.sigmoid_()", "F.relu({0}, inplace=True)")


def in_place(d: Drawing) -> None:
    """Changes of a copy, of all of it or through a view."""
    name = d.value(1)
    other = d.operand(name)
    copy = d.emit(f"{name}.{d.pick(('clone()', 'mul(1.5)', 'add(0.5)'))}")
    size = d.shape(copy)[0]
    for _ in range(d.number(1, 3)):
        how = d.number(0, 4)
        if how < 3:
            d.run(d.pick(IN_PLACE).format(copy, other))
        elif how == 3:
            at = d.pick(("0", f"{size - 1}:", "::2", f":{size // 2 or 1}"))
            value = d.pick(("0.5", f"{copy}[{at}] * 2", f"{copy}[{at}].detach().sin()"))
            d.run(f"{copy}[{at}] = {value}")
        else:
            view = d.pick((f"{copy}.select(-1, 0)", f"{copy}.narrow(0, 0, 1)", f"{copy}.flatten()"))
            d.run(f"{view}.{d.pick(('mul_(0.5)', 'add_(0.25)', 'zero_()'))}")
    if d.chance(30):
        d.run(d.pick(LAST).format(copy))
    d.used.discard(copy)


def assigned(d: Drawing) -> None:
    """A fresh tensor filled piece by piece."""
    name = d.value(1, 3)
    count = d.pick((2, 3))
    made = d.emit(f"{name}.new_zeros({[count, *d.shape(name)]})")
    for k in range(count):
        value = name if k == 0 else d.pick((f"{name} * {k + 1}", f"torch.tanh({name})"))
        d.run(f"{made}[{k}] = {value}")
    d.used.discard(made)


def written(d: Drawing) -> None:
    """Rows written, or added to, by number."""
    name = d.value(1, 3)
    count = d.pick((1, 2, 3))
    rest = list(d.shape(name))[1:]
    at = d.integers(d.shape(name)[0], count)
    rows = d.value(1, 4, lambda x: list(x.shape) == [count, *rest]) or d.parameter(count, *rest)
    # Drawn last, since eager refuses to write rows that are those written to.
    copy = d.emit(f"{name}.clone()")
    how = d.pick(
        (
            "{copy}.index_add_(0, {at}, {rows})",
            "{copy}.index_put_(({at},), {rows}, accumulate=True)",
            "{copy}[torch.arange({count}) % {size}] = {rows}",
            "{copy}.scatter_add_(0, {at}.reshape({ones}).expand({shape}), {rows})",
        )
    )
    d.run(
        how.format(
            copy=copy,
            at=at,
            rows=rows,
            count=count,
            size=d.shape(name)[0],
            ones=[count, *(1 for _ in rest)],
            shape=[count, *rest],
        )
        if count <= d.shape(name)[0] or "arange" not in how
        else f"{copy}[0] = {rows}[0]"
    )
    d.used.discard(copy)


def buffer(d: Drawing) -> None:
    """A buffer is read, and changed before or after that."""
    name = d.value(0, 3)
    held = d.buffer(*d.shape(name))
    change = d.pick(
        (f"{held}.mul_(0.9).add_({name}.detach(), alpha=0.1)", f"{held}.copy_({name}.detach())",
         f"{held}.add_(1)", f"{held} += {name}.detach() * 0.1")
    )  # fmt: skip
    if d.chance(50):
        d.run(change)
        d.emit(f"{name} * {held}")
    else:
        d.emit(f"{name} + {held}")
        d.run(change)


def dropout(d: Drawing) -> None:
    d.emit(f"F.dropout({d.value()}, {d.pick((0.5, 0.1))})")


def unused(d: Drawing) -> None:
    """Random numbers that nothing reads: what is drawn after them follows."""
    name = d.value()
    d.run(
        d.pick(
            (
                f"F.dropout({name}, 0.5)", f"F.dropout({name}, 1.0)", f"torch.rand_like({name})",
                f"{name}.detach().clone().uniform_()", "torch.randperm(5)", "torch.randn(3)",
                "torch.empty(4).bernoulli_(0.5)", "torch.randint(0, 7, (3,))",
            )
        )
    )  # fmt: skip
    if d.chance(70):
        dropout(d)


def counter(d: Drawing) -> None:
    """A buffer that counts calls."""
    name = d.fresh("b")
    d.state(f'self.register_buffer("{name}", torch.zeros((), dtype=torch.long))')
    d.run(f"self.{name} += 1")
    d.emit(f"{d.value()} * self.{name}")


def positions(d: Drawing) -> None:
    """What is made of nothing but numbers, beside a value."""
    name = d.value(1)
    size = d.shape(name)[-1]
    row = f"torch.arange({size}, dtype=torch.float64)"
    square = f"torch.arange({size})[None, :] <= torch.arange({size})[:, None]"
    if d[name].dim() > 1 and d.shape(name)[-2] == size and d.chance(60):
        how = d.pick(
            (
                f"{name}.masked_fill(~({square}), -2.0)",
                f"{name} + torch.eye({size}, dtype=torch.float64)",
                f"torch.where({square}, {name}, 0.0)",
                f"{name} * torch.ones({size}, {size}, dtype=torch.float64).tril()",
            )
        )
    else:
        how = d.pick(
            (
                f"{name} * torch.cos({row})",
                f"{name} + {row} / {size}",
                f"{name}.masked_fill({row} > {size // 2}, 0.5)",
                f"{name} + torch.full(({size},), 0.5, dtype=torch.float64)",
                f"{name} * torch.linspace(0, 1, {size}, dtype=torch.float64)",
            )
        )
    d.emit(how)


def numbered(d: Drawing) -> None:
    """Integers worked with: counts along a dim, or one of several as a mask."""
    name = d.value(1, 2)
    if d.chance(50):
        d.emit(f"{name} * ({name} > 0).long().cumsum({d.dim(name)})")
    else:
        classes = d.size()
        d.emit(f"F.one_hot({d.integers(classes, d.size())}, {classes}).to(torch.float64)")


OPS = (
    in_place, in_place, in_place, assigned, written, written, buffer, buffer, counter, dropout,
    dropout, unused, positions, positions, numbered,
)  # fmt: skip
