"""Rotary position embeddings (RoFormer, Su et al., 2021), and frequencies scaled for longer sequences.

The attributes of the scaling classes have the names of the keys in `rope_parameters` or `rope_scaling` of Hugging Face
configurations.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from poly_epo_jax.config.checks import check_of_type


@dataclasses.dataclass(frozen=True)
class Linear:
    """Divides all positions by `factor`."""

    factor: float

    def scale(self, frequencies: Float[Array, " H"], theta: float) -> Float[Array, " H"]:
        """Returns the scaled frequencies."""
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Divides frequencies by `factor` if their wavelength is long, and interpolates for medium wavelengths.

    Wavelengths are long above `original_max_position_embeddings` / `low_freq_factor` tokens, and short below
    `original_max_position_embeddings` / `high_freq_factor` tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies: Float[Array, " H"], theta: float) -> Float[Array, " H"]:
        """Returns the scaled frequencies."""
        periods = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (periods - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return _interpolate(frequencies, self.factor, jnp.clip(kept, 0, 1))


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN (Peng et al., 2023): interpolates between original and divided frequencies, and scales the rotated vectors.

    Attributes:
      factor: Divisor of low frequencies.
      original_max_position_embeddings: Maximum sequence length before scaling, in tokens.
      beta_fast: Number of periods in the original length above which a frequency is kept.
      beta_slow: Number of periods in the original length below which a frequency is divided by `factor`.
      attention_factor: Factor of rotated queries and of rotated keys. If None, it is 0.1 ln(factor) + 1.
      truncate: Whether the bounds of the interpolation are rounded outwards to whole indices.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def scale(self, frequencies: Float[Array, " H"], theta: float) -> Float[Array, " H"]:
        """Returns the scaled frequencies."""
        head_dim = 2 * len(frequencies)

        def index(periods: float) -> float:
            ratio = self.original_max_position_embeddings / (periods * 2 * math.pi)
            return head_dim * math.log(ratio) / (2 * math.log(theta))

        low, high = index(self.beta_fast), index(self.beta_slow)
        low, high = (math.floor(low), math.ceil(high)) if self.truncate else (low, high)
        low, high = max(low, 0), min(high, head_dim - 1)
        high = high + 0.001 if low == high else high
        kept = 1 - jnp.clip((jnp.arange(len(frequencies), dtype=jnp.float32) - low) / (high - low), 0, 1)
        return _interpolate(frequencies, self.factor, kept)

    @property
    def magnitude(self) -> float:
        """Factor of rotated vectors."""
        return yarn_magnitude(self.factor, 1.0) if self.attention_factor is None else self.attention_factor


SCALINGS = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
"""Scaling classes, by `rope_type` in Hugging Face configurations."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding of a layer.

    Attributes:
      theta: Base of the frequencies. 0 disables the rotation, so that the layer has no positions.
      scaling: Scaling of the frequencies, or None.
      fraction: Fraction of each head that is rotated, from the first element.
    """

    theta: float = 1e6
    scaling: Linear | Llama3 | Yarn | None = None
    fraction: float = 1.0


class Rotation(NamedTuple):
    """Cosines and sines of rotary angles, float32 [*tokens, 1, rotated elements / 2]."""

    cos: jax.Array
    sin: jax.Array


def make_rotation(rope: Rope, head_dim: int, positions: Int[Array, "*M"]) -> Rotation:
    """Computes the rotary angles of tokens (RoFormer, eq. 34) once, for all layers with the same `rope`.

    Args:
      rope: Rotary position embedding.
      head_dim: Width of a head.
      positions: Position of each token in its sequence.

    Returns:
      The angles.
    """
    half = int(head_dim * rope.fraction) // 2
    frequencies = rope.theta ** (-jnp.arange(half, dtype=jnp.float32) / half) if rope.theta else jnp.zeros(half)
    if rope.scaling is not None:
        frequencies = rope.scaling.scale(frequencies, rope.theta)
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, Yarn) else 1.0
    angles = positions[..., None, None].astype(jnp.float32) * frequencies.reshape((1,) * (positions.ndim + 1) + (half,))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if magnitude != 1.0:
        cos, sin = cos * magnitude, sin * magnitude
    # Without the barrier, the compiler would compute cosines and sines in every layer.
    return Rotation(*jax.lax.optimization_barrier((cos, sin)))


def rotate(x: Float[Array, "*M N D"], rotation: Rotation) -> Float[Array, "*M N D"]:
    """Applies rotary position embeddings, computed in float32.

    Args:
      x: Queries or keys. Element i of the first half of the rotated elements is rotated with element i of the second
        half.
      rotation: Rotary angles of the tokens.

    Returns:
      The rotated array, in the type of x.
    """
    cos, sin = rotation
    half = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def read_rope(key: str, written: Mapping[str, Any], max_position: int) -> Rope:
    """Reads the parameters of a rotary position embedding.

    Args:
      key: Key of config.json that contains the parameters, for errors.
      written: Parameters in the words of Hugging Face: `rope_theta`, and `rope_type` or `type` with its parameters.
      max_position: Default of `original_max_position_embeddings`.

    Returns:
      The rotary position embedding.

    Raises:
      ValueError: If the type or a parameter is not supported or invalid.
    """
    parameters = {name: value for name, value in written.items() if value is not None}
    kind, theta = parameters.pop("rope_type", parameters.pop("type", "default")), parameters.pop("rope_theta")
    parameters.pop("type", None)
    check_setting("rope_theta", theta, float)
    if parameters.pop("partial_rotary_factor", 1.0) != 1.0 or (kind != "default" and kind not in SCALINGS):
        raise ValueError(f"{key} {dict(written)!r} is not supported; choose a model without it.")
    if kind == "default":
        return Rope(float(theta))  # Transformers ignores other parameters of this type.
    if kind == "yarn":
        mscale, mscale_all_dim = parameters.pop("mscale", None), parameters.pop("mscale_all_dim", None)
        if mscale and mscale_all_dim and "attention_factor" not in parameters:
            magnitudes = (yarn_magnitude(parameters.get("factor", 1.0), scale) for scale in (mscale, mscale_all_dim))
            parameters["attention_factor"] = next(magnitudes) / next(magnitudes)
    fields = {field.name: field for field in dataclasses.fields(SCALINGS[kind])}
    if "original_max_position_embeddings" in fields:
        parameters.setdefault("original_max_position_embeddings", max_position)
    for name in parameters:
        if name not in fields:
            raise ValueError(f"{key}.{name} is not supported for rope_type {kind!r}; choose a model without it.")
    for name, field in fields.items():
        if name not in parameters and field.default is dataclasses.MISSING:
            raise ValueError(f"{key} does not contain {name!r}; add it.")
        if name in parameters and name != "truncate":
            check_setting(f"{key}.{name}", parameters[name], float)
    return Rope(float(theta), SCALINGS[kind](**parameters))


def write_rope(rope: Rope) -> dict[str, Any]:
    """Returns the `rope_parameters` of a Hugging Face configuration. Inverse of `read_rope`."""
    kind = next((name for name, scaling in SCALINGS.items() if isinstance(rope.scaling, scaling)), "default")
    parameters = {} if rope.scaling is None else dataclasses.asdict(rope.scaling)
    parameters["partial_rotary_factor"] = rope.fraction if rope.fraction != 1.0 else None
    return {"rope_type": kind, "rope_theta": rope.theta} | {
        name: value for name, value in parameters.items() if value is not None
    }


def yarn_magnitude(factor: float, scale: float) -> float:
    """Returns the default factor of rotated vectors in YaRN (eq. 22), with `scale` in place of 1."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _interpolate(frequencies: jax.Array, factor: float, kept: jax.Array) -> jax.Array:
    return frequencies * kept + frequencies / factor * (1 - kept)


def check_setting(name: str, value: Any, kind: Any) -> None:
    """Checks the type of a value of config.json. Numbers must be positive.

    Args:
      name: Key of the value, for the error message.
      value: The value.
      kind: Declared type, see `check_of_type`.

    Raises:
      ValueError: If the value is invalid.
    """
    check = check_of_type(kind)
    if not check.is_valid(value) or (kind in (int, float) and value <= 0):
        rule = f"{check.rule} greater than 0" if kind in (int, float) else check.rule
        raise ValueError(f"{name}={value!r} {rule}; create or download the model folder again.")
