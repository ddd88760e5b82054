"""Where generations come from: a name to a constructor each."""

from poly_epo_jax.rollouts.embedded import EmbeddedRollouts

ROLLOUTS = {"embedded": EmbeddedRollouts}
