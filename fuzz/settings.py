"""Tests configurations with invalid values, and with values at the limits of the declared ranges.

A value outside the type or range of its key must be rejected with a one-line error message that names the key. Values
within the range may be rejected in combination, but must not raise other exceptions or hang. Most attempts stop before
training starts. Some are complete commands: tiny runs with values at the limits of the ranges, and invalid flags.
"""

import contextlib
import io
import itertools
import math
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from huggingface_hub import constants
from outcome import Outcome

from poly_epo_jax import main
from poly_epo_jax.config import default
from poly_epo_jax.config.checks import Check, check_of_type
from poly_epo_jax.config.keys import Config
from poly_epo_jax.config.options import checks_of, options_of
from poly_epo_jax.registry import Range
from poly_epo_jax.startup.prepare import prepare
from poly_epo_jax.startup.read_config import KNOWN_NAMES, read_config, registry_entries

ROOT = Path(__file__).parents[1]
SECONDS = 120  # timeout of an attempt, on a busy machine
NUMBERS = [-(10**400), -1e308, -(2**63), -2, -1, 0, 1, 2, 2**31, 2**32, 2**63, 10**400, 1e-320, 1e38, 1e308]
INVALID = [
    None,
    True,
    math.nan,
    math.inf,
    -math.inf,
    "",
    " ",
    "a\0b",
    "\ud800",
    "ü" * 5000,
    b"x",
    [],
    [[]],
    (1, "2"),
    {},
    {"x": {1: 2}},
    {1, 2},
    object(),
    "inf",
    "1e400",
    *NUMBERS,
]
TEXTS = [
    "",
    " ",
    "-",
    "ü漢\U0001f600",
    "x" * 400,
    "../..",
    "/proc/x",
    "a\nb",
    "\x1b[31m",
    "(",
    "(" * 400,
    "a{9999999999}",
    "http://",
    "http://a:0",
    "http://a:99999",
    "http://[::1",
    "http://a b",
    "ftp://a",
    "http://a/v1",
    "a,,b",
    ",",
    "h:1",
]
NAMES = [
    *("float32", "bfloat16", "own", "max", "drop", "drop_always", "distinct", "train", "mask", "penalize"),
    *("max_tokens", "max_completion_tokens", "json_schema", "json_object", "none"),
]
"""Values of keys and options with a list of allowed texts."""
COMPONENTS: list[dict[str, Any]] = [
    {"task.name": "polynomial"},
    {"task.name": "multiplication"},
    {"task.name": "math", "task.options": {"train": "/proc/none.jsonl"}},
    {"judge.name": "llm", "judge.url": "http://127.0.0.1:1"},
    {"algo.loss": "clip_cov"},
]
FLAGS = [
    ["evaluate", "--num_generations=0"],
    ["evaluate", "--num_generations=1000000000000"],
    ["evaluate", "--num_generations=nan"],
    ["evaluate", "--max_problems=-1"],
    ["evaluate", "--models="],
    ["evaluate", "--models=,"],
    ["evaluate", "--models=http://"],
    ["evaluate", "--models=a\ud7ff/../.."],
    ["evaluate", "--models=a=configs,a=docs"],
    ["evaluate", "--models=..=configs"],
    ["evaluate", "--benchmarks="],
    ["evaluate", "--benchmarks=../x=polynomial"],
    ["evaluate", "--benchmarks=/proc/none.jsonl"],
    ["evaluate", "--config.task.options.num_held_out=0"],
    ["evaluate", "--output=/proc/x"],
    ["evaluate", "--output=setup.py/x"],
    ["bench", "--output=/proc/x/bench.json"],
    ["bench", "--output=configs"],
    ["bench", "--plan", "--output=setup.py/x"],
    ["bench", "--plan", "--config.base.hidden_size=0"],
    ["export", "/proc/x", "/proc/y"],
    ["export", "configs", "docs"],
    ["export", "configs", "x", "--step=-1"],
    ["export", "configs", "x", "--step=x"],
    ["export", "configs", "x", "--dtype=int8"],
    ["report", "/proc/none"],
    ["report", "setup.py"],
    ["report", "configs", "--output=/proc/x"],
    ["report", "configs", "--models=,,"],
]
"""Commands with invalid flags, which must be rejected."""

CORNERS: dict[str, list[Any]] = {
    "train.num_generations": [2, 3, 17],
    "algo.set_size": [1, 2],
    "algo.num_sets": [0, 1],
    "algo.advantages": ["marginal_set", "grpo", "grpo_div"],
    "algo.objective": ["polychromic", "pass_at_n", "mean_reward"],
    "algo.loss": ["ppo_clip", "cispo", "policy_gradient"],
    "algo.clip_low": [0.0, 1.0],
    "algo.clip_high": [0.0, 1000.0],
    "algo.importance_cap": [0.001, 1e6],
    "algo.kl_coef": [0.0, 1000.0],
    "algo.entropy_coef": [0.0, 1000.0],
    "algo.length_normalization": ["own", "max", "token"],
    "algo.truncated": ["train", "mask", "penalize"],
    "sampling.max_tokens": [1, 14],
    "sampling.temperature": [0.01, 1.0, 100.0],
    "sampling.top_k": [0, 1, 10**6],
    "train.prompts_per_batch": [1, 4],
    "train.prompts_per_minibatch": [1, 4],
    "train.rows_per_device": [1, 72],
    "train.max_prompt_tokens": [9, 10],
    "rollouts.max_concurrent": [1, 512],
    "optimizer.b1": [0.0, 0.9999],
    "optimizer.b2": [0.0, 0.999999],
    "optimizer.eps": [1e-20, 1.0],
    "optimizer.learning_rate": [1e-12, 0.01],
    "optimizer.max_grad_norm": [1e-8, 1e8],
    "optimizer.weight_decay": [0.0, 10.0],
    "optimizer.schedule": ["constant", "linear", "cosine"],
    "optimizer.warmup_updates": [0, 10**9],
    "eval.every": [0, 1],
    "eval.num_problems": [1, 40],
    "eval.num_generations": [1, 2],
    "judge.name": ["exact", "answer", "none"],
    "seed": [0, 2**32 - 1],
    "base.num_layers": [1, 2],
    "base.noisy_steps": [0, 1],
    "base.skew": [0.0, 100.0],
}
"""Values of keys for complete runs, most of them at the limits of what a tiny run allows."""


class Hang(BaseException):
    """Raised at the timeout. It is not an Exception, so that it cannot be mistaken for a rejection."""


def attack(random: random.Random, folder: Path) -> Iterator[Outcome]:
    """Alternates between single keys, options and several keys, with occasional command flags and complete runs."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # names of datasets are not looked up
    constants.HF_HUB_OFFLINE = True
    flags = iter(random.sample(FLAGS, len(FLAGS)))
    for number in itertools.count():
        yield _one_key(random, folder)
        yield _option(random, folder)
        yield _several_keys(random, folder)
        if number % 40 == 20 and (command := next(flags, None)):
            yield _command(command, folder)
        if number % 200 == 60:
            yield _complete_run(random, folder)


def _one_key(random: random.Random, folder: Path) -> Outcome:
    key, field, _ = random.choice([key for key in Config().flat() if not key[0].endswith("options")])
    checks = [check_of_type(field.type), field.metadata["check"]]
    value, is_outside = _value(random, [check for check in checks if check])
    return _attempt("a key", {key: value}, key if is_outside else "", folder)


def _option(random: random.Random, folder: Path) -> Outcome:
    component = random.choice(COMPONENTS)
    name = next(iter(component))
    key = "algo.loss_options" if name == "algo.loss" else name.replace(".name", ".options")
    option, parameter = random.choice(list(options_of(registry_entries(_read(component))[key]).items()))
    value, is_outside = _value(random, checks_of(parameter))
    changes = component | {key: {**component.get(key, {}), option: value}}
    return _attempt("an option", changes, f"{key}.{option}" if is_outside else "", folder)


def _several_keys(random: random.Random, folder: Path) -> Outcome:
    """Sets four keys to values within their ranges."""
    changes = {}
    for key, field, _ in random.sample([key for key in Config().flat() if not key[0].endswith("options")], 4):
        changes[key] = valid_value(random, key, field)
    return _attempt("keys together", changes, "", folder)


def valid_value(random: random.Random, key: str, field: Any) -> Any:
    """Returns a value that the checks of a key accept. Keys with a list of allowed texts need one of `NAMES`."""
    if names := KNOWN_NAMES.get(key):
        return random.choice(list(names))
    checks = [check_of_type(field.type), field.metadata["check"]]
    return _inside(random, [check for check in checks if check])


def _value(random: random.Random, checks: list[Check | Range]) -> tuple[Any, bool]:
    """Returns a value, and whether the checks must reject it."""
    if random.random() < 0.3:
        return _inside(random, checks), False
    limits = next((check for check in checks if isinstance(check, Range)), None)
    outside = (
        [limits.minimum - 1, limits.minimum * 0.99 - 1e-300, limits.maximum * 1.01, limits.maximum + 1]
        if limits
        else []
    )
    value = random.choice([*INVALID, *outside, *outside, *outside])
    # The comparison is repeated here to detect faults in Range.
    if limits and type(value) in (int, float):
        if value == limits.special or limits.minimum <= value <= limits.maximum:
            return value, any(not check.is_valid(value) for check in checks)
        return value, True
    return value, any(not check.is_valid(value) for check in checks)


def _inside(random: random.Random, checks: list[Check | Range]) -> Any:
    limits = next((check for check in checks if isinstance(check, Range)), None)
    if limits is None:
        values = [*TEXTS, *NAMES, True, False, (), ("a",), (1, 2), [2, 3], ("q_proj", "v_proj")]
        return random.choice([value for value in values if all(check.is_valid(value) for check in checks)])
    low, high = limits.minimum, limits.maximum
    edges = [low, high] if limits.special is None else [low, high, limits.special]
    middle = low + (high - low) * random.random() ** random.choice([1, 4, 16, 64])
    is_integer = all(isinstance(edge, int) for edge in edges) and not checks[0].is_valid(0.5)
    return random.choice([*edges, int(middle) if is_integer else float(middle)])


def _read(changes: Mapping[str, Any]) -> Config:
    """Reads a configuration as `main` does, but without the type checks of ConfigDict."""
    values = default.get_config().to_dict()
    for key, value in changes.items():
        *sections, name = key.split(".")
        inner = values
        for section in sections:
            inner = inner[section]
        inner[name] = value
    return read_config(SimpleNamespace(to_dict=lambda: values))  # pyright: ignore[reportArgumentType]


def _attempt(kind: str, changes: dict[str, Any], rejected: str, folder: Path) -> Outcome:
    """Reads and prepares a configuration.

    The attempt passes if no exception is raised except rejections and, if `rejected` is not empty, the configuration is
    rejected with a message that contains it.
    """
    own = {"workdir": str(folder / "run"), "base.cache_dir": str(folder / "base")}

    def check() -> None:
        prepare(_read({**own, "mesh.fsdp": 1, **changes}))

    fault, message = _watched(check, SECONDS)
    if not fault and rejected and rejected not in message:
        fault = f"not rejected with a message that names {rejected}: {message or 'accepted'}"
    shown = ", ".join(f"{key}={value!r:.80}" for key, value in changes.items())
    return Outcome(f"{kind}, {'invalid' if rejected else 'within its range'}", not fault, f"{shown}: {fault}")


def _watched(function: Callable[[], Any], seconds: int) -> tuple[str, str]:
    """Calls a function, and returns a description of its fault and its rejection message. Each is empty if absent."""

    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            function()
        return "", ""
    except Hang:
        return f"hung for {seconds} s", ""
    except (ValueError, OSError, ImportError) as error:
        message = " ".join(str(error).split())
        complete = message.endswith(".") or (isinstance(error, OSError) and message)
        raw = isinstance(error, UnicodeError) or not complete
        return (f"invalid rejection message: {type(error).__name__}: {message}" if raw else ""), message
    except BaseException:
        return traceback.format_exc(), ""
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _complete_run(random: random.Random, folder: Path) -> Outcome:
    corners = {key: random.choice(values) for key, values in CORNERS.items() if random.random() < 0.4}
    run = folder / f"run{random.randrange(10**9)}"
    tiny = {
        "workdir": str(run),
        "compilation_cache_dir": str(folder / "compiled"),
        "mesh.fsdp": 1,
        "base.cache_dir": str(folder / "base"),
        "base.clean_steps": 2,
        "base.noisy_steps": 1,
        "base.batch_size": 4,
        "base.hidden_size": 16,
        "base.mlp_size": 24,
        "base.head_dim": 8,
        "train.num_steps": 2,
        "train.prompts_per_batch": 4,
        "train.prompts_per_minibatch": 2,
        "train.rows_per_device": 4,
        "eval.num_generations": 2,
    }
    fault, _ = _watched(lambda: main.run(_read(tiny | corners)), 300)
    return Outcome("a complete run", not fault, f"{corners}: {fault}")


def _command(arguments: list[str], folder: Path) -> Outcome:
    module, *flags = arguments
    if module in ("evaluate", "bench"):
        flags = [f"--config={ROOT}/configs/polynomial.py", "--config.mesh.fsdp=1", *flags]
    for flag in ("models=configs", "benchmarks=polynomial", f"output={folder}/evaluation"):
        if module == "evaluate" and not any(one.startswith(f"--{flag.split('=')[0]}=") for one in flags):
            flags.append(f"--{flag}")
    command = [sys.executable, "-m", f"poly_epo_jax.{module}", *flags]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return Outcome("a command's flags", False, f"{arguments}: hung for 120 s")
    output = ended.stderr.strip()
    held = ended.returncode in (1, 2) and "Traceback" not in output and "rror: " in output.splitlines()[-1]
    return Outcome("a command's flags", held, f"{arguments}: exit {ended.returncode}: {output[-2000:]}")
