"""The stages of a training step, from graded groups to new weights."""
