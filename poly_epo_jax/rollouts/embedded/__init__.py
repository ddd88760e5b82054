"""Sampler that generates in the trainer's process, with the trainer's devices and weights."""
