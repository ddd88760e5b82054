"""Clusters recorded responses again with one or several judges, and compares the clusterings."""
