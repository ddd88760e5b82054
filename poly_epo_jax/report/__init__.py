"""Draws figures and writes an HTML page from the files of runs and evaluations."""
