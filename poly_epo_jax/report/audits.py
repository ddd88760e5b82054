"""Draws the audits of a run's judge over training, and shows the prompts on which judge and auditor disagree most."""

import html
import itertools
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from poly_epo_jax.metrics.agreement import adjusted_rand_index, degenerate_as_singletons
from poly_epo_jax.metrics.judge_audit import AUDIT_METRICS, summarize
from poly_epo_jax.records.recorded_groups import read_generations
from poly_epo_jax.records.run_folder import GENERATIONS, LOGGED_GENERATION
from poly_epo_jax.report.document import interval_cell, table, text_table
from poly_epo_jax.report.figures import MARKED, panels, step_axes, styles
from poly_epo_jax.report.generations import TextExcerpt
from poly_epo_jax.report.page import metric_list
from poly_epo_jax.system.json_files import Row, read_rows

SHOWN_PROMPTS, SHOWN_CHARACTERS = 3, 600
PANELS = {"inflation": "", "clusters": "auditor_clusters", "objective": "auditor_objective"}
"""Metric of each panel, and the same metric by the auditor."""


def plot_audits(audits: Mapping[str, Sequence[Row]], set_sizes: Mapping[str, int]) -> Figure | None:
    """Draws inflation, rewarded diversity and objective over training, with 95% intervals over prompts.

    Args:
      audits: Rows of audit.jsonl by run.
      set_sizes: Set size n of the objective, by run.

    Returns:
      The figure, or None if no run was audited.
    """
    if not any(audits.values()):
        return None
    with panels(len(PANELS), 3, (4.2, 3.1)) as (figure, drawn):
        for label, style in styles(list(audits)).items():
            by_step = itertools.groupby(sorted(audits[label], key=itemgetter("step")), key=itemgetter("step"))
            found = {step: summarize(rows, set_sizes[label]) for step, rows in by_step}
            for axes, names in zip(drawn, PANELS.items(), strict=True):
                for name, look in zip(filter(None, names), ({}, {"linestyle": ":", "marker": "s"}), strict=False):
                    points = {step: of_step[name] for step, of_step in found.items() if of_step[name]}
                    shown = f"{label}, {'judge' if not look else 'auditor'}" if names[1] else label
                    axes.plot(
                        [*points],
                        [value["mean"] for value in points.values()],
                        **dict[str, Any](MARKED | style | look | {"label": shown}),
                    )
                    ends = {step: value for step, value in points.items() if value["low"] is not None}
                    low, high = ([value[end] for value in ends.values()] for end in ("low", "high"))
                    axes.fill_between([*ends], low, high, color=style["color"], alpha=0.15, linewidth=0)
        for axes, name in zip(drawn, PANELS, strict=True):
            axes.set_title(AUDIT_METRICS[name][0].capitalize())
        drawn[0].axhline(1, color="#888888", linewidth=0.8)
        drawn[1].set_title("Clusters per prompt")
        drawn[1].legend(fontsize=9)
        step_axes(drawn)
    return figure


def audit_details(label: str, folder: Path, rows: Sequence[Row], set_size: int) -> str:
    """Returns HTML with the results over all audited steps, the failures and the prompts with most disagreement.

    Args:
      label: Label of the run.
      folder: The run folder.
      rows: Rows of audit.jsonl.
      set_size: Set size n of the objective.
    """
    found = summarize(rows, set_size)
    cells = [
        [html.escape(title), interval_cell(found[name]), str(found[name]["num_problems"] if found[name] else 0)]
        for name, (title, _) in AUDIT_METRICS.items()
    ]
    failed = [reason for row in rows for reason in row["failures"].values()]
    example = f" For example: {html.escape(failed[0])}" if failed else ""
    parts = [
        f"<h3>{html.escape(label)}</h3>",
        table(["result", "mean", "prompts"], cells),
        f"<p>{len(failed)} requests of audits failed.{example}</p>",
    ]
    judged = [row for row in rows if row["auditor"] is not None]
    pairs = [[degenerate_as_singletons(np.array(row[name])) for name in ("clusters", "auditor")] for row in judged]
    order = [judged[index] for index in np.argsort([adjusted_rand_index(*pair) for pair in pairs], kind="stable")]
    steps = {row["step"] for row in order[:SHOWN_PROMPTS]}
    responses = {
        group.name: group.responses
        for group in read_generations(
            row for row in read_rows(folder / GENERATIONS, LOGGED_GENERATION) if row["step"] in steps
        )
    }
    for row in order[:SHOWN_PROMPTS]:
        texts = [TextExcerpt.of(text).within(SHOWN_CHARACTERS) for text in responses.get(row["group"], ())]
        lines = sorted(zip(texts, row["clusters"], row["auditor"], strict=False), key=itemgetter(1, 2))
        shown = text_table(["response", "judge", "auditor"], [[*map(str, line)] for line in lines])
        parts.append(f"<details><summary>Disagreement: {html.escape(row['group'])}</summary>{shown}</details>")
    return "".join([*parts, metric_list(AUDIT_METRICS.values())])
