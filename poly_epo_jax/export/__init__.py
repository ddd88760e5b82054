"""Exports a trained policy as a Hugging Face folder with a model card."""
