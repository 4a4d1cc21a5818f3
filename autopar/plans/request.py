"""All that decides a plan, and a short text that is equal only for equal ones."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from autopar.ir.fingerprint import fingerprint
from autopar.ir.graph import Graph
from autopar.ir.mesh import Cluster, Mesh
from autopar.plans.compatibility import describe_inputs
from autopar.plans.options import Options

_DIGEST_BYTES = 20
_PACKAGES = ("torch", "highspy", "pulp", "numpy", "numba", "networkx", "msgspec")
"""What a plan passes through, beside autopar."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A graph, and what is asked of a plan for it; `options` with constraints that speak of what
    the graph has."""

    graph: Graph
    cluster: Cluster
    options: Options
    margin: bool = False
    """Whether the plan is to say how far the best one of another structure is behind."""

    def digest(self) -> str:
        """A hash of everything that decides the plan, down to the source of autopar and the
        versions of what it stands on: with any of them changed, there may be another plan."""
        return _digest(
            fingerprint(self.graph),
            self.graph.name,
            *describe_inputs(self.graph),
            repr(self.cluster),
            repr(self.options),
            repr(self.margin),
            *_versions(),
            source_digest(Path(__file__).parents[1]),
        )


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A plan is wanted for `graph` on `mesh`, which is laid over `cluster`, as `options` say."""

    graph: Graph
    cluster: Cluster
    mesh: Mesh
    options: Options

    @property
    def memory_limit_bytes(self) -> int:
        """What each device may hold."""
        return self.options.memory_limit_bytes or self.cluster.device.memory_bytes

    def within(self, limit_bytes: int) -> PlanRequest:
        """The same with another memory limit."""
        return replace(self, options=replace(self.options, memory_limit_bytes=limit_bytes))


@cache
def source_digest(package: Path) -> str:
    """A hash of the Python files of a package, names and contents."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def _versions() -> tuple[str, ...]:
    return (f"python {platform.python_version()}", *_installed())


def _installed() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            yield f"{name}: none"


def _digest(*parts: str) -> str:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        raw = part.encode(errors="surrogatepass")
        digest.update(b"%d " % len(raw))
        digest.update(raw)
    return digest.hexdigest()
