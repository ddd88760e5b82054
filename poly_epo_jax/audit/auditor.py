"""Audits a judge on recorded groups: repeated and permuted requests, copies of responses, and a second judge.

Of each audited step, the same random sample of groups is audited, during a run and by the audit command. Requests are
made by separate instances of the judges, so the counters and connections of the training judge are not affected.
"""

import asyncio
import dataclasses
import itertools
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from poly_epo_jax.config.keys import Config, ConfigError
from poly_epo_jax.judges import JUDGES
from poly_epo_jax.judges.capacity import TOKENS_PER_FRAME, TOKENS_PER_VERDICT
from poly_epo_jax.judges.probes import PROBES, Paraphraser, copy_of
from poly_epo_jax.judges.reply import ReplyError
from poly_epo_jax.judges.variants import FIRST, Variant
from poly_epo_jax.metrics.agreement import degenerate_as_singletons, pairwise_agreement
from poly_epo_jax.records.recorded_groups import RecordedGroup, read_generations
from poly_epo_jax.records.run_folder import AUDIT, AUDITED, GENERATIONS, LOGGED_GENERATION
from poly_epo_jax.rejudge.inputs import with_answers
from poly_epo_jax.rejudge.judges import REQUESTED_AGAIN, request_clustering
from poly_epo_jax.startup.read_config import make_judge, training_judge
from poly_epo_jax.system.json_files import Row, keep_rows, read_rows
from poly_epo_jax.types import DEGENERATE_CLUSTER, Judge, Task

REPEATED = {"repetition": Variant(1, 0), "order": Variant(0, 1)}
"""Variants of the recorded request, by probe."""
COPIED = Variant(0, 2)
"""Variant of requests with a copy, whose place among the responses is therefore random."""
UNFINISHED = "unfinished"
"""Kind of the failure of groups whose audit did not complete before the end of the run."""


class Auditor:
    """Audits the training judge, and compares it with the judge of `audit.judge`, if there is one.

    Args:
      config: Configuration of the run.
      task: Task of the run.

    Attributes:
      second_name: Name, model and options of the second judge, as in rows of audit.jsonl.
    """

    def __init__(self, config: Config, task: Task):
        self._config, self._task, second = config, task, config.audit.judge
        options = json.dumps(dict(second.options), sort_keys=True) if second.options else ""
        self.second_name = " ".join(filter(None, (second.name, second.model, options)))
        self._judge = training_judge(config, task)
        self._second = make_judge(config.audit.judge, task) if JUDGES[config.audit.judge.name].clusters else None
        self._paraphraser = Paraphraser(config.audit.paraphrase) if config.audit.paraphrase.url else None

    def sample(self, step: int, rows: Iterable[Row]) -> list[RecordedGroup]:
        """Returns the groups of a step that are audited: a random sample of those that the judge has clustered.

        Args:
          step: The step, from which the sample is derived.
          rows: Rows of generations.jsonl of this step.
        """
        groups = [group for group in read_generations(rows) if group.clusters is not None and len(group.clusters) > 1]
        count = min(self._config.audit.num_prompts, len(groups))
        places = np.random.default_rng([self._config.seed, step]).choice(len(groups), count, replace=False)
        return [groups[place] for place in sorted(places)]

    async def audit(self, step: int, groups: Sequence[RecordedGroup]) -> list[Row]:
        """Audits groups concurrently, and returns a row with the columns of `AUDITED` for each.

        Raises:
          ConfigError: If the task does not contain a problem of the groups.
        """
        return await asyncio.gather(*(self._audit(step, group) for group in with_answers(groups, self._task)))

    def cost(self, num_groups: int) -> str:
        """Returns a sentence with the maximum numbers of requests and tokens of the audits of this many groups."""
        config, train = self._config, self._config.train
        response = config.sampling.max_tokens + TOKENS_PER_FRAME + TOKENS_PER_VERDICT
        millions = (train.max_prompt_tokens + (train.num_generations + 1) * response) / 1e6
        requests = [(config.judge, num_groups * (len(REPEATED) + len(PROBES)))]
        requests += [(config.audit.judge, num_groups)] if self._second else []
        parts = [
            f"{count:,} requests to {section.dotted('name')}={section.name!r}"
            + f" ({count * millions:.3g} million tokens without the rubric)" * bool(section.url)
            for section, count in requests
        ]
        if self._paraphraser:
            tokens = num_groups * 2 * response / 1e6
            parts.append(f"{num_groups:,} requests to audit.paraphrase.url ({tokens:.3g} million tokens)")
        return f"Audits of {num_groups:,} prompts: at most {' and '.join(parts)}, without repeated requests."

    async def _audit(self, step: int, group: RecordedGroup) -> Row:
        asked = {name: (self._judge, group, variant) for name, variant in REPEATED.items()}
        if self._second:
            asked["auditor"] = (self._second, group, FIRST)
        places = [] if group.turns else np.flatnonzero(np.array(group.clusters) != DEGENERATE_CLUSTER)
        place = int(places[zlib.crc32(group.name.encode()) % len(places)]) if len(places) else 0
        probes, failures = dict(PROBES) if len(places) else {}, {}
        if probes and self._paraphraser:
            try:
                rewritten = await self._paraphraser.rewrite(group.responses[place])
                probes["paraphrase"] = (lambda _: rewritten,)
            except ReplyError as error:
                probes["paraphrase"], failures["paraphrase"] = (), f"{error.kind}: {error}"
        for name, rules in probes.items():
            if copy := copy_of(group.responses[place], rules, group.problem, self._task):
                asked[name] = (self._judge, dataclasses.replace(group, responses=(*group.responses, copy)), COPIED)
        by_name = dict(zip(asked, await asyncio.gather(*(_request(*one) for one in asked.values())), strict=True))
        found = {name: reply for name, reply in by_name.items() if isinstance(reply, np.ndarray)}
        failures |= {name: reply for name, reply in by_name.items() if isinstance(reply, str)}
        row: Row = empty_row(step, group, failures) | {"judge": self.second_name}
        if "auditor" in found:
            row["auditor"] = found.pop("auditor").tolist()
        recorded = degenerate_as_singletons(np.array(group.clusters))
        for name, ids in found.items():
            if name in REPEATED:
                row["probes"][name] = 1 - pairwise_agreement(recorded, degenerate_as_singletons(ids))
            else:
                row["probes"][name] = float(ids[-1] not in (ids[place], DEGENERATE_CLUSTER))
        return row


async def _request(judge: Judge, group: RecordedGroup, variant: Variant) -> np.ndarray | str:
    """Returns the cluster ids in the recorded order, or the kind and the reason of the failure."""
    try:
        found = await request_clustering(judge, group, variant)
    except Exception as error:  # a user's judge may raise any exception, which must not stop the run
        return f"raised: {type(error).__name__}: {error}"
    return f"{found['failure']}: {found['reason']}" if found["clusters"] is None else np.array(found["clusters"])


def empty_row(step: int, group: RecordedGroup, failures: Mapping[str, str] | None = None) -> Row:
    """Returns a row with the columns of `AUDITED` without results."""
    shown = {"step": step, "group": group.name, "rewards": list(group.rewards), "clusters": list(group.clusters or ())}
    return {**shown, "auditor": None, "probes": dict.fromkeys((*REPEATED, *PROBES)), "failures": dict(failures or {})}


def missing_audits(
    folder: Path, auditor: Auditor, every: int, last_step: int
) -> Iterator[tuple[int, list[RecordedGroup]]]:
    """Yields the audited steps of a run that lack results, with the groups that lack them.

    Rows of failed requests without a reply are removed from audit.jsonl, because the requests are made again.

    Args:
      folder: The run folder.
      auditor: Selects the groups.
      every: Interval between audited steps. The last logged step is audited in addition.
      last_step: Last step of the run.

    Raises:
      ConfigError: If another second judge has audited the run.
    """
    again = (*REQUESTED_AGAIN, UNFINISHED)
    if (folder / AUDIT).exists():
        keep_rows(
            folder / AUDIT, AUDITED, lambda row: not any(text.startswith(again) for text in row["failures"].values())
        )
    audited = list(read_rows(folder / AUDIT, AUDITED))
    if others := {row["judge"] for row in audited if "judge" in row} - {auditor.second_name}:
        raise ConfigError(
            f"{folder / AUDIT} has audits with audit.judge {others.pop()!r} instead of {auditor.second_name!r}; rename "
            "or delete the file to audit with another judge."
        )
    complete = {row["group"] for row in audited}
    rows = read_rows(folder / GENERATIONS, LOGGED_GENERATION)
    for step, of_step in itertools.groupby(rows, key=lambda row: row["step"]):
        groups = auditor.sample(step, of_step) if step % every == 0 or step == last_step else []
        if missing := [group for group in groups if group.name not in complete]:
            yield step, missing


def warn_of_failures(rows: Sequence[Row]) -> None:
    """Prints a warning to stderr if requests of audits have failed."""
    if failed := [row for row in rows if row["failures"]]:
        name, reason = next(iter(failed[0]["failures"].items()))
        print(
            f"Warning: The audits of {len(failed)} of {len(rows)} prompts failed at least in part, for example in step "
            f"{failed[0]['step']}, {name}: {reason.rstrip('.')}. Training is not affected. Run poly-epo audit to "
            "repeat requests without a reply.",
            file=sys.stderr,
        )
