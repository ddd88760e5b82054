"""Baseline advantage estimators from rewards only, or from rewards and another feature (see docs/methods.md)."""
