"""Figures and a page of what runs and evaluations left behind."""
