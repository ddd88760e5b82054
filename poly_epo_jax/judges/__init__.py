"""Judges cluster generations by strategy. A new judge is one file that meets `types.Judge` and one line here."""

from poly_epo_jax.judges.exact import ExactJudge

JUDGES = {"exact": ExactJudge}

__all__ = ["JUDGES", "ExactJudge"]
