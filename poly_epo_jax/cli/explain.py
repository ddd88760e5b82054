"""Prints the advantages of the responses to one prompt with four methods, without training.

    poly-epo explain --rewards 1,1,1,1,1,1,0,0 --strategies A,A,A,A,A,B,A,C

The example has six correct responses, five with strategy A and one with B, and two incorrect responses with A and C.
"""

import argparse
import math
import sys
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from poly_epo_jax import set_rl
from poly_epo_jax.config.keys import AlgoSection
from poly_epo_jax.system.signals import exit_code

NAMES: dict[int | float, str] = {0: "wrong", 1: "right"}
"""Names of rewards in tables. Other rewards are printed as numbers."""


def group_advantages(
    rewards: Sequence[int | float], strategies: Sequence[str], set_size: int
) -> dict[str, Float[np.ndarray, " N"]]:
    """Computes the advantages of the N responses to one prompt with GRPO, GRPO+DIV, MaxRL and Poly-EPO.

    GRPO+DIV uses the default of `algo.diversity_coef`. Poly-EPO scores all C(N, set_size) sets.

    Args:
      rewards: Reward of each response, in [0, 1].
      strategies: Strategy of each response, by name. Responses with the same strategy form a cluster.
      set_size: Number of responses in a set.

    Returns:
      Advantages of the responses, in their order, by title of the method.

    Raises:
      ValueError: If the lengths differ, a reward is outside [0, 1], or not 1 <= set_size < N.
    """
    if len(rewards) != len(strategies):
        raise ValueError(
            f"{len(rewards)} rewards do not match {len(strategies)} strategies; specify one of each per response."
        )
    if outside := [reward for reward in rewards if not 0 <= reward <= 1]:
        raise ValueError(f"The reward {outside[0]:g} is outside [0, 1]; specify rewards between 0 and 1.")
    _, ids = np.unique(np.array(strategies), return_inverse=True)
    group = np.array([rewards], np.float32)
    clusters = np.array([ids + (ids >= set_rl.DEGENERATE_CLUSTER)])  # no strategy has the id of degenerate responses
    advantages = {
        "GRPO": set_rl.grpo_advantages(group),
        "GRPO+DIV": set_rl.grpo_div_advantages(group, clusters, AlgoSection().diversity_coef),
        "MaxRL": set_rl.max_rl_advantages(group),
        "Poly-EPO": set_rl.polychromic_advantages(group, clusters, set_size),
    }
    return {title: np.asarray(values)[0] for title, values in advantages.items()}


def in_rms_units(advantages: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Divides the advantages of a method by their root mean square, so that methods can be compared."""
    root_mean_square = np.sqrt(np.mean(advantages**2))
    return advantages / root_mean_square if root_mean_square else advantages


def describe_group(rewards: Sequence[int | float], strategies: Sequence[str], set_size: int) -> str:
    """Returns two tables of the advantages of a group, with a row for each combination of strategy and reward.

    Rows are in descending order of Poly-EPO's advantage. The second table is in units of each method's root mean
    square.

    Args:
      rewards: Reward of each response, in [0, 1].
      strategies: Strategy of each response, by name.
      set_size: Number of responses in a set.

    Raises:
      ValueError: If an argument is invalid, see `group_advantages`.
    """
    advantages = group_advantages(rewards, strategies, set_size)
    responses = list(zip(strategies, rewards, strict=True))
    kinds = sorted(set(responses), key=lambda kind: (-advantages["Poly-EPO"][responses.index(kind)], *kind))
    width = max(8, *map(len, strategies))
    lines = [
        f"{len(responses)} responses to one prompt form {math.comb(len(responses), set_size):,} sets of {set_size}."
    ]
    in_units = {title: in_rms_units(values) for title, values in advantages.items()}
    for heading, columns, decimals in (
        ("Advantages:", advantages, 3),
        ("Advantages in units of each method's root mean square:", in_units, 1),
    ):
        titles = "".join(f"{title:>10}" for title in columns)
        lines += ["", heading, f"{'strategy':<{width}}  reward  responses{titles}"]
        for strategy, reward in kinds:
            index, number = responses.index((strategy, reward)), responses.count((strategy, reward))
            cells = "".join(f"{values[index]:>+10.{decimals}f}" for values in columns.values())
            lines.append(f"{strategy:<{width}}  {NAMES.get(reward, f'{reward:g}'):<6}  {number:>9}{cells}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (`sys.argv` if None). Returns the exit code: 2 after an error."""
    parser = argparse.ArgumentParser(
        "poly-epo explain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rewards", required=True, type=_rewards, metavar="R,R,..", help="rewards in [0, 1]")
    parser.add_argument(
        "--strategies",
        required=True,
        type=lambda text: [*map(str.strip, text.split(","))],
        metavar="S,S,..",
        help="names of strategies",
    )
    size = AlgoSection().set_size
    parser.add_argument("--set_size", type=int, default=size, metavar="N", help=f"responses in a set (default: {size})")

    def work() -> None:
        options = parser.parse_args(arguments)
        print(describe_group(options.rewards, options.strategies, options.set_size))

    return exit_code(work)


def _rewards(text: str) -> list[float]:
    try:
        return list(map(float, text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers, separated by commas") from None


if __name__ == "__main__":
    sys.exit(main())
