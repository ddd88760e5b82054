"""Measures the stages of a training step, or estimates them for other machines."""
