"""Stages of a training step, from graded groups to updated weights."""
