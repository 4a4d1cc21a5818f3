"""Files that are there whole or not at all, and those that hold one value as canonical JSON."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import msgspec

from autopar.errors import AutoparError, CacheWarning

PIPE_WAIT_S = 5.0
"""How long a named pipe may be without the other end."""

_DESCRIPTORS = ("/dev/fd", "/proc/self/fd")
_MAX_LINKS = 40

_warned: set[str] = set()
"""What this process has warned of already, by `warn_without_cache`."""


def write_atomically(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file under another name, have it on the disk, and rename it: whoever reads finds the
    old file or the new one. Through a link, the file it leads to is replaced and the link stays.
    What is no file (a device, a pipe, a descriptor as in /dev/stdout) is written to.

    OSError if it cannot be written; a file is then as it was, and nothing is left behind.
    """
    descriptor = _descriptor(path)
    if descriptor is not None:
        sys.stdout.flush()
        _write_through(os.dup(descriptor), data)
        return
    try:
        mode = Path(path).stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is None or stat.S_ISREG(mode):
        _replace(Path(os.path.realpath(path)), data, mode)
    elif stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
    else:
        _write_through(_open_to_write(path), data)


def read_at_most(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """The first `max_bytes` of a file, or of what comes through a pipe. OSError if it cannot be
    read, or if nobody writes to the pipe."""
    # A pipe that nobody writes to would block the opening.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        first = _first_of_pipe(descriptor, max_bytes) if is_pipe else b""
        os.set_blocking(descriptor, True)
        return first + file.read(max_bytes - len(first))


def is_standard_output(path: str | os.PathLike[str]) -> bool:
    """Whether what is written to `path` comes out of this process's standard output."""
    return _descriptor(path) == 1


def _replace(target: Path, data: bytes, mode: int | None) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_through(descriptor: int, data: bytes) -> None:
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _open_to_write(path: str | os.PathLike[str]) -> int:
    """A descriptor of a device or a pipe; OSError if nobody reads from the pipe."""
    deadline = time.monotonic() + PIPE_WAIT_S
    while True:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            if time.monotonic() > deadline:
                raise OSError(
                    errno.ENXIO, f"it is a pipe, and nobody read from it in {PIPE_WAIT_S:g} s"
                ) from None
            time.sleep(0.05)
        else:
            os.set_blocking(descriptor, True)
            return descriptor


def _first_of_pipe(descriptor: int, max_bytes: int) -> bytes:
    """What a pipe has to read, once it has something or somebody who will write it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    has_come = poll.poll(1000 * PIPE_WAIT_S)
    try:
        first = os.read(descriptor, max_bytes)
    except BlockingIOError:
        return b""
    if not (first or has_come):
        raise OSError(errno.EPIPE, f"it is a pipe, and nobody wrote to it in {PIPE_WAIT_S:g} s")
    return first


def _descriptor(path: str | os.PathLike[str]) -> int | None:
    """The open descriptor of this process that `path` is another name of, as /dev/stdout is."""
    folders = {os.path.realpath(folder) for folder in _DESCRIPTORS}
    place = Path(path)
    for _ in range(_MAX_LINKS):
        if place.name.isdecimal() and os.path.realpath(place.parent) in folders:
            return int(place.name)
        if not place.is_symlink():
            return None
        place = place.parent / place.readlink()
    return None


def warn_without_cache(what: str, reason: str, consequence: str) -> None:
    """A `CacheWarning`, once in a process for each `what`, that it cannot be cached."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(
            CacheWarning(f"{what} cannot be kept ({reason}). {consequence}"), stacklevel=3
        )


# Files that hold one value as canonical JSON: strict to read, atomic to write.
#
# A file is valid only if it is byte for byte the encoding of what it decodes to: no duplicate key,
# no other order, no edit by hand gets through.

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
            raise self.error(
                f"{source}: {len(data)} bytes; a {self.what} has at most {MAX_FILE_BYTES}"
            )
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
            raise self.error(
                f"cannot write {self.what} {os.fspath(path)}: {error.strerror}"
            ) from None

    def load(self, path: str | os.PathLike[str]) -> NounT:
        """The value in a file; an error if it is missing, damaged or of another version."""
        try:
            source = os.fspath(path)
        except TypeError:
            raise self.error(
                f"{self.what}={path!r} is neither a {self.what} nor the path of one"
            ) from None
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
