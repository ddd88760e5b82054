"""Builds the section of a report that helps to reproduce the study: settings, versions, run times and failures."""

import html

from poly_epo_jax.report.document import table
from poly_epo_jax.report.settings import settings_section
from poly_epo_jax.study.folder import clock
from poly_epo_jax.study.results import StudyResults


def reproduction_section(results: StudyResults) -> str:
    """Returns the last section of the page, as HTML."""
    labels = {one.key.path: one for one in results.results}
    settings = settings_section(
        {label: one.config for label, one in labels.items()}, {label: one.versions for label, one in labels.items()}
    )
    return (
        '<section id="reproduction"><h2>Reproduction</h2>'
        "<p>The command of the study reproduces all runs. With the embedded sampler, the same versions and the same "
        "kind of device, the metrics.jsonl files of the runs are byte-identical.</p>"
        f"{_attempts(results)}</section>{settings}"
    )


def _attempts(results: StudyResults) -> str:
    """Returns a table of run times and failures, with a row per started run."""
    rows = []
    for one in results.results:
        own = [row for row in results.attempts if row["run"] == one.key.path]
        if not own:
            continue
        seconds = {
            stage: sum(row["seconds"] for row in own if row["stage"] == stage) for stage in ("train", "evaluate")
        }
        failures = [
            f"{row['started']}: {row['stage']}, exit code {row['exit']}: {row['error']}" for row in own if row["exit"]
        ]
        state = "finished" if one.state.is_finished else f"<b class='wrong'>{html.escape(str(one.state))}</b>"
        rows.append(
            [
                html.escape(one.key.path),
                state,
                str(sum(row["stage"] == "train" for row in own)),
                clock(seconds["train"]),
                clock(seconds["evaluate"]) if seconds["evaluate"] else "-",
                "<br>".join(map(html.escape, failures)) or "-",
            ]
        )
    if not rows:
        return "<p>No runs have been started by the study command.</p>"
    total, failed = sum(row["seconds"] for row in results.attempts), sum(row["exit"] != 0 for row in results.attempts)
    starts = f"{failed} of {len(results.attempts)} attempts failed or were stopped"
    summary = f"Total time of all runs, including parallel runs: {clock(total)}. {starts}."
    header = ["run", "state", "attempts", "training", "evaluation", "failures"]
    details = f"<details><summary>All runs</summary>{table(header, rows)}</details>"
    return f"<h3>Time and failures</h3><p>{summary}</p>{details}"
