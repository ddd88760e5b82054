"""Rivals of the paper's method, in files by the features that they read. docs/methods.md lists them."""
