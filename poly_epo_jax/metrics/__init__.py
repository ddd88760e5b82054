"""Metrics of generations, confidence intervals, and the registries of evaluation metrics and logged metrics."""
