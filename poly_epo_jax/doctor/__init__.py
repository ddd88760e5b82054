"""Checks whether devices, kernels, disk, servers and judge do what a run will ask of them."""
