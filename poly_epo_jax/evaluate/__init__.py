"""Measures models on benchmarks: draws generations and computes numbers from them."""
