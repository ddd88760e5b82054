"""Models measured on benchmarks: samples drawn, numbers made from them."""
