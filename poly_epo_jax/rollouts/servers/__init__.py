"""Sampler that sends prompts and weights to inference servers, such as SGLang."""
