"""Models measured on benchmarks: generations drawn, numbers made from them."""
