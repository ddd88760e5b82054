"""Opens the judges and the reference of a comparison: their configurations, descriptions and requests."""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.judges import JUDGES, judge_identity
from poly_epo_jax.judges.capacity import CHARS_PER_TOKEN, warn_capacity
from poly_epo_jax.judges.variants import Variant
from poly_epo_jax.records.progress import progress_bar
from poly_epo_jax.records.recorded_groups import RecordedGroup
from poly_epo_jax.rejudge.judge_groups import judge_groups
from poly_epo_jax.rejudge.results import RECORDED, REFERENCE, Clusters
from poly_epo_jax.rejudge.sheets import read_sheet
from poly_epo_jax.startup.command_line import KEY, with_overrides
from poly_epo_jax.system.digests import json_digest, option_digests
from poly_epo_jax.system.user_path import user_path
from poly_epo_jax.types import Judge, JudgeLoad

_JUDGE = re.compile(r"(?:(?P<label>[^:=]*)=)?(?P<name>[^:=]+)(?::(?P<keys>.*))?", re.DOTALL)


def judge_configs(config: Config, judges: Sequence[str]) -> dict[str, Config]:
    """Returns the configuration of each judge by its label.

    Args:
      config: The configuration of --config.
      judges: Values of --judge. If empty, the judge of the configuration is used.

    Raises:
      ConfigError: If a value is invalid, or two judges have the same label.
    """
    found: dict[str, Config] = {}
    for text in judges or [config.judge.name]:
        match = _JUDGE.fullmatch(text)
        if match is None:
            raise ConfigError(f"--judge={text} must have the form NAME or LABEL=NAME:KEY=VALUE,...")
        name, label = match["name"], match["name"] if match["label"] is None else match["label"]
        if "/" in label or label in ("", ".", "..", RECORDED, REFERENCE) or label in found:
            raise ConfigError(
                f"--judge={text} has the label {label!r}, which is a duplicate, reserved or not a valid folder name; "
                "set a unique label with LABEL=NAME."
            )
        overrides = [f"name={name}"] if name == config.judge.name else [f"name={name}", "options={}"]
        overrides += re.split(r",(?=[\w.]+=)", match["keys"]) if match["keys"] else []
        found[label] = with_overrides(config, [f"{KEY}judge.{override}" for override in overrides])
        if not JUDGES[name].clusters:
            raise ConfigError(f"--judge={text} does not cluster responses; choose another judge.")
    return found


def read_reference(text: str, labels: Collection[str], groups: Sequence[RecordedGroup]) -> Clusters | str | None:
    """Returns the clusters in a sheet, the label of a judge, or None for an empty text.

    Args:
      text: Value of --reference.
      labels: Labels of the judges.
      groups: All groups.

    Raises:
      ValueError, OSError: If the value is neither a label nor a sheet with clusters of the groups.
    """
    is_recorded = text == RECORDED and any(group.clusters is not None for group in groups)
    if not text or is_recorded or text in labels:
        return text or None
    path = user_path(text)
    if not path.is_file():
        raise ConfigError(
            f"--reference={text} is neither a file nor a judge; specify a cluster sheet, or one of "
            f"{', '.join(labels)}, or {RECORDED} for an input with recorded clusters."
        )
    return read_sheet(path, groups)


def describe(config: Config, judge: Judge, groups: Sequence[RecordedGroup]) -> dict[str, Any]:
    """Waits for the server of a judge, and returns the content of about.json.

    Args:
      config: Configuration of the judge.
      judge: The judge.
      groups: All groups, whose texts the description identifies.
    """
    section, identity = config.judge, asyncio.run(judge_identity(judge))
    problems = json_digest([(group.name, group.problem.prompt, group.responses) for group in groups])
    return {
        "judge": {"name": section.name, "model": section.model, "options": dict(section.options)},
        "digests": {**option_digests("judge.options", section.options), **identity, "problems": problems},
    }


def request_clusterings(
    folder: Path, judge: Judge, groups: Sequence[RecordedGroup], wanted: Sequence[Variant], max_concurrent: int
) -> None:
    """Requests the missing clusterings of a judge and shows the progress.

    Warns if the longest group does not fit into the judge's context.

    Args:
      folder: Folder of the judge.
      judge: The judge.
      groups: All groups.
      wanted: Variants of the requests.
      max_concurrent: Maximum number of concurrent requests.
    """
    prompts = [group.problem.prompt for group in groups]
    responses = [response for group in groups for response in group.responses]
    tokens = [math.ceil(max(map(len, texts)) / CHARS_PER_TOKEN) for texts in (prompts, responses)]

    async def work(show: Callable[[int], None]) -> None:
        num_turns = max(len(turns) // 2 + 1 for group in groups for turns in group.turns or ((),))
        load = JudgeLoad(max(len(group.responses) for group in groups), *tokens, num_turns=num_turns)
        await warn_capacity(judge, load)
        await judge_groups(folder, judge, groups, wanted, max_concurrent, show)

    with progress_bar(f"{folder.name}: requests", len(groups) * len(wanted)) as show:
        asyncio.run(work(show))
