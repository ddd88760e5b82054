"""Records of a run: the run folder, metrics, the timeline, and the progress display."""
