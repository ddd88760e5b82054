"""Compiles a run's programs for an accelerator on any machine, and estimates their memory, time and communication."""
