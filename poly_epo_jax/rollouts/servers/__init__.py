"""Sampler that sends prompts and weights to inference servers. Independent of the kind of server, see `dialect`."""
