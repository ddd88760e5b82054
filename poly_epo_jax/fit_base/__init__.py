"""Fits a tiny base policy without training it."""
