"""Startup of a run: command line, configuration, checks and initial policy."""
