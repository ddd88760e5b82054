"""Checks a run: its configuration against a recipe, and its curves against bands from runs of the recipe."""
