"""Sampler that runs the compiled programs of the embedded sampler with the scheduler of JetStream."""
