"""Baseline advantage estimators from rewards, or from rewards and another feature (see docs/reference/methods.md)."""
