"""Meshes of any shape, whose links nothing here looks at."""

from __future__ import annotations

from autopar.ir.mesh import Axis, Link, Mesh

_LINK = Link("none", 1.0, 0.0, 0.0, "tests")


def mesh(*sizes: int) -> Mesh:
    """Axes `ax0`, `ax1`, ... of these sizes."""
    return Mesh(tuple(Axis(f"ax{k}", size, _LINK) for k, size in enumerate(sizes)))
