"""Files, processes, signals and HTTP: nothing here knows of machine learning, and nothing imports JAX."""
