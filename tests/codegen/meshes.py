"""Meshes of any shape, which are laid over no cluster."""

from __future__ import annotations

from autopar.ir.mesh import Axis, Mesh


def mesh(*sizes: int) -> Mesh:
    """Axes `ax0`, `ax1`, ... of these sizes."""
    return Mesh(tuple(Axis(f"ax{k}", size) for k, size in enumerate(sizes)))
