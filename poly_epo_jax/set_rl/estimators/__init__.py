"""Rivals of the paper's method, a file for each kind, told apart by what they read. docs/methods.md lists them."""
