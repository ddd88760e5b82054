"""Baseline advantage estimators, one module per kind of feature that they read (see docs/methods.md)."""
