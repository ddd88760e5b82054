"""Measures all advantage estimators at P = 128 prompts and N = 64 generations: python benchmarks/estimators.py

Each compiled estimator runs with its default options. The time is the median of 50 calls. Embeddings have 64
dimensions. `marginal_set` is measured with each objective that has a closed form, and sets of 8 (4.4 billion sets per
prompt).
"""

import jax
import numpy as np
from advantages import median_milliseconds

from poly_epo_jax import set_rl
from poly_epo_jax.config.keys import AlgoSection
from poly_epo_jax.step.advantages import ADVANTAGES, make_estimator

NUM_PROMPTS, NUM_GENERATIONS, DIMENSIONS, SET_SIZE, CALLS = 128, 64, 64, 8, 50


def random_features() -> dict[str, np.ndarray]:
    """Returns random features of shape [NUM_PROMPTS, NUM_GENERATIONS, ...] by name."""
    rng = np.random.default_rng(0)
    shape = (NUM_PROMPTS, NUM_GENERATIONS)
    return {
        "rewards": rng.integers(0, 2, shape).astype(np.float32),
        "clusters": rng.integers(1, 6, shape).astype(np.int32),
        "mean_logprob": -rng.random(shape).astype(np.float32),
        "embeddings": rng.normal(size=(*shape, DIMENSIONS)).astype(np.float32),
    }


def main() -> None:
    """Measures the estimators and prints the results."""
    closed = [name for name, objective in set_rl.OBJECTIVES.items() if objective.closed_form]
    sections = {f"marginal_set, {name}": AlgoSection(objective=name, set_size=SET_SIZE) for name in closed}
    sections |= {name: AlgoSection(advantages=name) for name in ADVANTAGES if name != "marginal_set"}
    features, key = jax.device_put(random_features()), jax.random.key(0)
    print(f"{NUM_PROMPTS} prompts of {NUM_GENERATIONS} generations on {jax.devices()[0].device_kind}, median per call")
    for name, section in sections.items():
        estimator = make_estimator(section)
        read = {feature: features[feature] for feature in estimator.reads}
        time = median_milliseconds(jax.jit(estimator.advantages), key, read, repeats=CALLS)
        print(f"{name:36}{time:10.3f} ms", flush=True)


if __name__ == "__main__":
    main()
