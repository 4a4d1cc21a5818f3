"""Machines: devices, links, what was measured of them, and the meshes over them."""
