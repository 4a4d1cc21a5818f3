"""Files that hold one value as canonical JSON: strict to read, atomic to write.

A file is valid only if it is byte for byte the encoding of what it decodes to: no duplicate key, no
other order, no edit by hand gets through.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from autopar.errors import AutoparError

MAX_FILE_BYTES = 64 << 20


class Noun(Protocol):
    """A msgspec Struct that knows the version of its schema and can check itself."""

    @property
    def schema(self) -> int: ...

    def check(self) -> None:
        """ValueError, naming the place, if the parts do not make sense together."""
        ...


NounT = TypeVar("NounT", bound=Noun)


@dataclass(frozen=True, slots=True)
class Format(Generic[NounT]):
    """How values of `kind` are read and written. `what` is its word in errors ("plan"), `remake`
    how one is made anew ("plan again"), `schema` the version that is read, `error` what is raised.
    """

    kind: type[NounT]
    what: str
    remake: str
    schema: int
    error: type[AutoparError]

    def encode(self, value: NounT) -> bytes:
        """Canonical JSON: sorted keys, two-space indent, a final newline."""
        raw = msgspec.json.encode(value, order="sorted")
        return msgspec.json.format(raw, indent=2) + b"\n"

    def decode(self, data: bytes, source: str) -> NounT:
        """The inverse of `encode`; an error that names `source` and the place on anything else."""
        if len(data) > MAX_FILE_BYTES:
            size = f"{len(data)} bytes; a {self.what} has at most {MAX_FILE_BYTES}"
            raise self.error(f"{source}: {size}")
        try:
            value = msgspec.json.decode(data, type=self.kind)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise self.error(f"{source}: not a {self.what}: {error}") from None
        if value.schema != self.schema:
            raise self.error(
                f"{source}: schema version {value.schema}, this autopar reads {self.schema}; "
                f"{self.remake} with this version"
            )
        if self.encode(value) != data:
            raise self.error(
                f"{source}: not in canonical form (edited by hand, or damaged); {self.remake}, "
                "or load and save it with the autopar that made it"
            )
        try:
            value.check()
        except ValueError as error:
            raise self.error(f"{source}: {error}") from None
        return value

    def save(self, value: NounT, path: str | os.PathLike[str]) -> None:
        """Write the file atomically: whoever reads finds the old one or the new one. An error if
        it cannot be written."""
        target = Path(path)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            with temporary.open("wb") as file:
                file.write(self.encode(value))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                reason = f"cannot write {self.what} {target}: {error.strerror}"
                raise self.error(reason) from None
            raise

    def load(self, path: str | os.PathLike[str]) -> NounT:
        """The value in a file; an error if it is missing, damaged or of another version."""
        source = os.fspath(path)
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        except OSError as error:
            raise self.error(f"cannot read {self.what} {source}: {error.strerror}") from None
        return self.decode(data, source)
