"""Audits the judge of a run: stability, copies of responses, and agreement with a second judge."""
