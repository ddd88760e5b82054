"""Draws figures, and writes a page, from the files of runs and evaluations."""
