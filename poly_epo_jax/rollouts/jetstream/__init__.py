"""The embedded sampler's programs, driven by JetStream."""
