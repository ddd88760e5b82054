"""What a run leaves behind: its folder, its metrics, its timeline, and what is shown while it runs."""
