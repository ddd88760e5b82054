"""Checks and measures an accelerator in a few minutes, see docs/how_to/check_a_machine.md."""
