"""How fast each stage of a training step is."""
