"""Checks devices, kernels, disk, servers and judge with the configuration of a run."""
