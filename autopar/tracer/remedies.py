"""What to write in the place of a call that a trace cannot follow: by what is called, and by what
becomes of its result."""

from __future__ import annotations

from torch.overrides import resolve_name

from autopar.tracer.places import StackLocation, ValueUse, call_at, use_of


class Refusal(Exception):
    """What cannot be traced is called: `args` say what that is, and what to write instead."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what, remedy)
        self.what, self.remedy = what, remedy


_KNOWN_LATE = "a value that is known only when the model runs "
_AS_ARGUMENT = (
    "take it before the call and pass it as an argument of the model, which makes a program for "
    "each value"
)

_BY_USE: dict[ValueUse, str] = {
    "branch": _KNOWN_LATE + "decides which code runs: compute both sides and choose with "
    f"torch.where(condition, a, b); or {_AS_ARGUMENT}",
    "chance": _KNOWN_LATE + "decides by chance which code runs, and a program has the same ops in "
    "every step: set the probability to 0, or compute both sides and choose with "
    "torch.where(torch.rand([]) < p, a, b)",
    "size": _KNOWN_LATE + f"is a size or a bound: {_AS_ARGUMENT}; or use a bound that is fixed, "
    "and a mask",
    "index": _KNOWN_LATE
    + "picks an item: of a tensor, take x.index_select(dim, index.reshape(1)); "
    f"of a list, a dict or modules, {_AS_ARGUMENT}",
    "order": _KNOWN_LATE + "decides the order in Python: use torch.maximum, torch.minimum or "
    "torch.sort",
    "log": _KNOWN_LATE + "is kept or shown in Python: return the tensor as an output of the model, "
    "and keep or show it after the call",
    "number": _KNOWN_LATE + "becomes a number of Python: leave the conversion out, since a tensor "
    "without dims is computed with like a number; x.detach() has no gradient",
}

_PICKED = (
    "how much a mask picks is known only when the model runs: keep the shape, as in "
    "torch.where(mask, x, 0).sum() / mask.sum() for a mean and torch.where(mask, value, x) for an "
    "assignment"
)
_COUNTED = (
    "how many there are is known only when the model runs: keep the mask and use torch.where(mask, "
    "a, b), or give a number with torch.nonzero_static(mask, size=number)"
)
_DISTINCT = (
    "how many distinct values there are is known only when the model runs: do it before the call, "
    "and pass the result as an argument of the model, which makes a program for each shape"
)
_NUMPY = (
    "numpy computes outside of what is traced: write it with torch, or compute it before the call "
    "and pass the result as an argument of the model"
)
_MEMORY = "a tensor has no memory while the model is traced: leave out what asks for it"
_EQUAL = (
    "whether tensors are equal is known only when the model runs: (a == b).all() is a tensor, to "
    "be used with torch.where(condition, x, y)"
)
_PACKED = (
    "how long each sequence is, is known only when the model runs: give the layer the padded "
    "tensor, and leave out what is behind the ends with torch.where(mask, output, 0)"
)

_BY_CALL = {
    "torch.Tensor.masked_select": _PICKED,
    "torch.masked_select": _PICKED,
    "torch.Tensor.nonzero": _COUNTED,
    "torch.nonzero": _COUNTED,
    "torch.argwhere": _COUNTED,
    "torch.Tensor.argwhere": _COUNTED,
    "torch.where": _COUNTED,
    "torch.Tensor.where": _COUNTED,
    "torch.Tensor.unique": _DISTINCT,
    "torch.functional.unique": _DISTINCT,
    "torch.unique": _DISTINCT,
    "torch.Tensor.unique_consecutive": _DISTINCT,
    "torch.unique_consecutive": _DISTINCT,
    "torch.functional.unique_consecutive": _DISTINCT,
    "torch.repeat_interleave": "say how long the result is: repeat_interleave(..., output_size=n)",
    "torch.Tensor.repeat_interleave": "say how long the result is: "
    "repeat_interleave(..., output_size=n)",
    "torch.bincount": "minlength is no bound: count with F.one_hot(x, num_classes=n).sum(0)",
    "torch.Tensor.bincount": "minlength is no bound: count with F.one_hot(x, num_classes=n).sum(0)",
    "torch.nn.functional.one_hot": "say how many classes there are: F.one_hot(x, num_classes=n)",
    "torch.Tensor.numpy": _NUMPY,
    "torch.Tensor.__array__": _NUMPY,
    "torch.Tensor.__array_wrap__": _NUMPY,
    "torch.Tensor.data_ptr": _MEMORY,
    "torch.Tensor.untyped_storage": _MEMORY,
    "torch.Tensor.storage": _MEMORY,
    "torch.Tensor.__deepcopy__": "copy a tensor in forward with x.clone()",
    "torch.Tensor.__reduce_ex__": "a tensor has no values while the model is traced: return it as "
    "an output of the model, and save it after the call",
    "torch.equal": _EQUAL,
    "torch.Tensor.equal": _EQUAL,
    "torch.allclose": _EQUAL,
    "torch.Tensor.allclose": _EQUAL,
    "torch.linalg.lstsq": "torch cannot say of what shape its results are: solve the normal "
    "equations, torch.linalg.solve(a.mT @ a, a.mT @ b)",
    "_VariableFunctionsClass._pack_padded_sequence": _PACKED,
}

_CALLED = {
    "__bool__": "bool(tensor)",
    "__int__": "int(tensor)",
    "__float__": "float(tensor)",
    "__index__": "a tensor as an index or a size",
    "__contains__": "in",
    "__getitem__": "x[index]",
    "__setitem__": "x[index] = value",
    "__array__": "numpy's view of a tensor",
    "__array_wrap__": "numpy's view of a tensor",
    "__deepcopy__": "copy.deepcopy(tensor)",
    "__reduce_ex__": "pickling a tensor",
}


def function_name(func: object) -> str:
    """What users call a function of torch: "torch.Tensor.item"."""
    return resolve_name(func) or str(getattr(func, "__qualname__", func))  # pyright: ignore[reportArgumentType]


def called(name: str, place: StackLocation | None) -> str:
    """A function of `function_name`, as it is written at `place`."""
    if name == "torch.Tensor.item" and place is not None:
        # What all looks at one value come down to.
        written = call_at(place)
        is_method = written in ("item", "tolist")
        return f"torch.Tensor.{written}" if is_method else f"{written or 'bool'}(tensor)"
    return _CALLED.get(name.rpartition(".")[2], name)


def remedy_of_call(name: str) -> str | None:
    """What to write for what `name` is, whatever it fails with; None if that is not known."""
    return _BY_CALL.get(name)


def remedy_of_value(place: StackLocation | None, message: str) -> str:
    """What to write where a value that is known late is read at `place`; the error `message` which
    op reads it."""
    if "nonzero" in message:
        return _PICKED
    return _BY_USE["branch" if place is None else use_of(place)]
