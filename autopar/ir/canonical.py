"""Files that hold one value as canonical JSON: strict to read, atomic to write.

A file is valid only if it is byte for byte the encoding of what it decodes to: no duplicate key, no
other order, no edit by hand gets through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from autopar.errors import AutoparError
from autopar.ir.files import read_at_most, write_atomically

MAX_FILE_BYTES = 16 << 20


class _Noun(Protocol):
    """A msgspec Struct that knows the version of its schema and can check itself."""

    @property
    def schema(self) -> int: ...

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together."""
        ...


NounT = TypeVar("NounT", bound=_Noun)


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Wire:
    """How the content of a file differs from its value.

    Objects and lists down to `depth` have a line per entry, those below are in one line (None: all
    have lines); the entries of a list under a name in `nested` as if they stood where the list is
    named. `pack` makes of what the value decodes to what is written, `unpack` the inverse;
    the latter is handed whatever was in a file, and raises ValueError if it cannot be.
    """

    depth: int | None = None
    nested: frozenset[str] = frozenset()
    pack: Callable[[Any], Any] = _as_it_is
    unpack: Callable[[Any], Any] = _as_it_is


@dataclass(frozen=True, slots=True)
class Format(Generic[NounT]):
    """How values of `kind` are read and written. `what` is its word in errors ("plan"), `remake`
    how one is made anew ("plan again"), `schema` the version that is written, `error` what is
    raised.
    """

    kind: type[NounT]
    what: str
    remake: str
    schema: int
    error: type[AutoparError]
    wire: Wire = Wire()

    def encode(self, value: NounT) -> bytes:
        """Canonical JSON: sorted keys, two-space indent, a final newline."""
        return self._written(self.wire.pack(msgspec.to_builtins(value)))

    def decode(self, data: bytes, source: str) -> NounT:
        """The inverse of `encode`; an error that names `source` and the place on anything else."""
        if len(data) > MAX_FILE_BYTES:
            size = f"{len(data)} bytes; a {self.what} has at most {MAX_FILE_BYTES}"
            raise self.error(f"{source}: {size}")
        try:
            content: Any = msgspec.json.decode(data)
            version = _version(content)
            if version != self.schema:
                newer = ", or install a newer one" if version > self.schema else ""
                raise self.error(
                    f"{source}: schema version {version}, this autopar reads {self.schema}; "
                    f"{self.remake} with this version{newer}"
                )
            if self._written(content) != data:
                raise self.error(self._not_canonical(source))
            value = msgspec.convert(self.wire.unpack(content), self.kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.error(f"{source}: not a {self.what}: {error}") from None
        if self.encode(value) != data:
            raise self.error(self._not_canonical(source))
        try:
            value.check()
        except ValueError as error:
            raise self.error(f"{source}: {error}") from None
        return value

    def _written(self, content: Any) -> bytes:
        return written(content, self.wire.depth, self.wire.nested)

    def _not_canonical(self, source: str) -> str:
        return (
            f"{source}: not in canonical form (edited by hand, or damaged); {self.remake}, or load "
            "and save it with the autopar that made it"
        )

    def save(self, value: NounT, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old one or the new one. An error if
        it cannot be written."""
        try:
            write_atomically(path, self.encode(value))
        except OSError as error:
            reason = f"cannot write {self.what} {os.fspath(path)}: {error.strerror}"
            raise self.error(reason) from None

    def load(self, path: str | os.PathLike[str]) -> NounT:
        """The value in a file; an error if it is missing, damaged or of another version."""
        try:
            source = os.fspath(path)
        except TypeError:
            reason = f"{self.what}={path!r} is neither a {self.what} nor the path of one"
            raise self.error(reason) from None
        try:
            data = read_at_most(path, MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self.error(f"cannot read {self.what} {source}: {error.strerror}") from None
        return self.decode(data, source)


def _version(content: Any) -> int:
    version: Any = (
        cast(dict[str, Any], content).get("schema") if isinstance(content, dict) else None
    )
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError("it has no schema version")
    return version


def written(content: Any, depth: int | None, nested: Collection[str] = ()) -> bytes:
    """Canonical JSON of what JSON can hold; `depth` and `nested` as in `Wire`."""
    raw = msgspec.json.encode(content, order="sorted")
    if depth is None:
        return msgspec.json.format(raw, indent=2) + b"\n"
    names = {msgspec.json.encode(name) + b": " for name in nested}
    return b"".join(_lines(raw, depth, b"\n", names)) + b"\n"


def _lines(raw: bytes, depth: int, newline: bytes, nested: Collection[bytes]) -> Iterator[bytes]:
    """`raw`, compact JSON, laid out as `Wire` says."""
    if depth == 0 or raw[:1] not in (b"{", b"[") or raw in (b"{}", b"[]"):
        yield msgspec.json.format(raw, indent=0)
        return
    is_object = raw[:1] == b"{"
    within = newline + b"  "
    entries: Iterable[tuple[bytes, msgspec.Raw]]
    if is_object:
        table = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        entries = ((msgspec.json.encode(key) + b": ", value) for key, value in table.items())
    else:
        entries = ((b"", value) for value in msgspec.json.decode(raw, type=list[msgspec.Raw]))
    before = b"{" if is_object else b"["
    for key, value in entries:
        yield before + within + key
        is_nested = key in nested and bytes(value)[:1] == b"["
        deeper = depth + 1 if is_nested else depth - 1
        yield from _lines(bytes(value), deeper, within, nested)
        before = b","
    yield newline + (b"}" if is_object else b"]")
