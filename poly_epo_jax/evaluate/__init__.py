"""Evaluates models on benchmarks: generates responses, grades them and computes metrics."""
