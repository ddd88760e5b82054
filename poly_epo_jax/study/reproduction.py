"""What is needed to reproduce a study: settings, versions, the time that it took, and what failed."""

import html

from poly_epo_jax.report.document import table
from poly_epo_jax.report.settings import settings_section
from poly_epo_jax.study.folder import clock
from poly_epo_jax.study.results import StudyResults


def reproduction_section(results: StudyResults) -> str:
    """HTML of the last part of the page."""
    labels = {one.key.path: one for one in results.results}
    settings = settings_section(
        {label: one.config for label, one in labels.items()}, {label: one.versions for label, one in labels.items()}
    )
    return (
        '<section id="reproduction"><h2>How to reproduce it</h2>'
        "<p>The command of the study makes every run again; with the embedded sampler and the same versions on the "
        "same kind of device, each leaves the same bytes in its metrics.jsonl.</p>"
        f"{_attempts(results)}</section>{settings}"
    )


def _attempts(results: StudyResults) -> str:
    """Time and failures: one row per run that has been started."""
    rows = []
    for one in results.results:
        own = [row for row in results.attempts if row["run"] == one.key.path]
        if not own:
            continue
        seconds = {
            stage: sum(row["seconds"] for row in own if row["stage"] == stage) for stage in ("train", "evaluate")
        }
        failures = [
            f"{row['started']}: {row['stage']} ended with {row['exit']}: {row['error']}" for row in own if row["exit"]
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
        return "<p>No run has been started by the study's command.</p>"
    total, failed = sum(row["seconds"] for row in results.attempts), sum(row["exit"] != 0 for row in results.attempts)
    starts = f"{failed} of {len(results.attempts)} starts failed or were ended"
    summary = f"{clock(total)} in all, the times of runs side by side added up; {starts}."
    header = ["run", "state", "starts", "training", "evaluation", "failures"]
    details = f"<details><summary>Each run</summary>{table(header, rows)}</details>"
    return f"<h3>Time and failures</h3><p>{summary}</p>{details}"
