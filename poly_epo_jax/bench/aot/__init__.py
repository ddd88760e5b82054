"""What a run's programs hold, compute and send on an accelerator, read from programs compiled for it on any machine."""
