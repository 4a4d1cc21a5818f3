"""Files that are there whole or not at all, and what stands in for files: devices, pipes, links."""

from __future__ import annotations

import errno
import os
import select
import stat
import sys
import time
import warnings
from contextlib import suppress
from pathlib import Path

from autopar.errors import CacheWarning

PIPE_WAIT_S = 5.0
"""How long a named pipe may be without the other end."""

_DESCRIPTORS = ("/dev/fd", "/proc/self/fd")
_MAX_LINKS = 40

_not_kept: set[str] = set()
"""What this process has said of that it cannot keep it."""


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
                why = f"it is a pipe, and nobody read from it in {PIPE_WAIT_S:g} s"
                raise OSError(errno.ENXIO, why) from None
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
    """A `CacheWarning`, once in a process for each `what`, that it cannot be kept."""
    if what not in _not_kept:
        _not_kept.add(what)
        text = f"{what} cannot be kept ({reason}). {consequence}"
        warnings.warn(CacheWarning(text), stacklevel=3)
