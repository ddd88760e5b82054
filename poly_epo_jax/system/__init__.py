"""Utilities for files, processes, signals and HTTP. They are independent of machine learning and do not import JAX."""
