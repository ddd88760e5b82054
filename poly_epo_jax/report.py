"""Draws what happened in one run, or in several side by side: figures and one page that needs nothing else.

    python -m poly_epo_jax.report RUN [RUN ...] [--output DIR]

writes training_dynamics.png, pass_at_k.png, comparison.png and report.html (with the first two inside it), by default
to RUN/report, or for several runs to report/ beside the first. It may be called while a run is still training.
"""

import argparse
import base64
import html
import importlib.resources
import re
import string
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from poly_epo_jax import figures
from poly_epo_jax.set_rl import DEGENERATE_CLUSTER
from poly_epo_jax.tracking import METRICS, SAMPLES, TIMING, read_rows

PROBLEMS_SHOWN = 5
STEPS_AVERAGED = 10
INLINE_CHARACTERS = 60  # a response of one short line needs no unfolding
Rows = list[dict[str, Any]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line (`sys.argv` if None) and returns the exit code: 2 if there is nothing to report on."""
    parser = argparse.ArgumentParser("python -m poly_epo_jax.report", description="Report on finished or live runs.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--output", type=Path, metavar="DIR", help="where to write; default: report/ in or beside RUN")
    options = parser.parse_args(arguments)
    default = (options.runs[0] if len(options.runs) == 1 else options.runs[0].resolve().parent) / "report"
    try:
        page = write_report(options.runs, options.output or default)
    except (OSError, ValueError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    print(f"report: {page}")
    return 0


def write_report(run_dirs: Sequence[Path], output: Path) -> Path:
    """Writes figures and page for the given runs to `output`, made if missing, and returns the page's path.

    Raises:
      ValueError: a run folder is missing, holds no logged step, or holds a damaged row.
      OSError: `output` cannot be written.
    """
    labels = _labels(run_dirs)
    metrics = {label: _read_metrics(run_dir) for label, run_dir in labels.items()}
    timing = {label: read_rows(run_dir / TIMING) for label, run_dir in labels.items()}
    samples = {label: read_rows(run_dir / SAMPLES) for label, run_dir in labels.items()}

    output.mkdir(parents=True, exist_ok=True)
    drawn = {
        "training_dynamics": figures.training_dynamics(metrics),
        "pass_at_k": figures.pass_at_k(metrics),
        "comparison": figures.comparison(metrics),
    }
    for name, figure in drawn.items():
        if figure is not None:
            figure.savefig(output / f"{name}.png")

    template = importlib.resources.files("poly_epo_jax").joinpath("report.html.template").read_text(encoding="utf-8")
    page = output / "report.html"
    page.write_text(
        string.Template(template).substitute(
            title=html.escape(" · ".join(labels)),
            summaries="\n".join(f"<li>{_summary(label, rows)}</li>" for label, rows in metrics.items()),
            figures="\n".join(
                _embed(output / f"{name}.png") for name in ("training_dynamics", "pass_at_k") if drawn[name] is not None
            ),
            table=_table({label: _final_values(metrics[label] + timing[label]) for label in labels}),
            samples="\n".join(_run_samples(label, rows) for label, rows in samples.items()),
        ),
        encoding="utf-8",
        errors="replace",
    )
    return page


def _labels(run_dirs: Sequence[Path]) -> dict[str, Path]:
    names = [run_dir.resolve().name for run_dir in run_dirs]
    return {
        name if names.count(name) == 1 else str(run_dir): run_dir for name, run_dir in zip(names, run_dirs, strict=True)
    }


def _read_metrics(run_dir: Path) -> Rows:
    if not run_dir.is_dir():
        raise ValueError(f"{run_dir} is not a folder: name the run folder of a training run, the one with {METRICS}.")
    rows = read_rows(run_dir / METRICS)
    if not rows:
        raise ValueError(f"{run_dir} holds no logged step ({METRICS} is missing or empty): let the run train first.")
    return rows


def _summary(label: str, rows: Rows) -> str:
    steps, rewards = figures.series(rows, "eval/reward")
    _, clusters = figures.series(rows, "eval/correct_clusters@8")
    name = f"<b>{html.escape(label)}</b>"
    if not len(steps):
        return f"{name}: no evaluation up to step {rows[-1]['step']}."
    changes = [f"held-out reward: {rewards[0]:.3f} → {rewards[-1]:.3f}"]
    if len(clusters):
        changes.append(f"distinct correct clusters of 8: {clusters[0]:.2f} → {clusters[-1]:.2f}")
    return f"{name}: {', '.join(changes)}, from step {steps[0]} to step {steps[-1]}."


def _embed(picture: Path) -> str:
    name = picture.stem.replace("_", " ")
    data = base64.b64encode(picture.read_bytes()).decode()
    image = f'<img alt="{name}" src="data:image/png;base64,{data}">'
    return f'<figure class="{picture.stem}"><div class="wide">{image}</div></figure>'


def _final_values(rows: Rows) -> dict[str, float]:
    values = {}
    for metric in {key for row in rows for key in row if key != "step"}:
        _, logged = figures.series(rows, metric)
        if len(logged):
            values[metric] = float(logged[-1] if metric.startswith("eval/") else logged[-STEPS_AVERAGED:].mean())
    return values


def _table(finals: Mapping[str, Mapping[str, float]]) -> str:
    def natural(metric: str) -> list[Any]:
        words_and_numbers = [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", metric)]
        return [not metric.startswith("eval/"), "/" in metric, *words_and_numbers]

    header = "".join(f"<th>{html.escape(label)}</th>" for label in finals)
    lines = [f"<tr><th>metric</th>{header}</tr>"]
    for metric in sorted({metric for values in finals.values() for metric in values}, key=natural):
        cells = [f"{values[metric]:.4g}" if metric in values else "-" for values in finals.values()]
        lines.append(f"<tr><td>{html.escape(metric)}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _run_samples(label: str, rows: Rows) -> str:
    if not rows:
        return f"<h3>{html.escape(label)}</h3><p>No generations were logged.</p>"
    last = rows[-1]["step"]
    problems: dict[str, Rows] = {}
    for row in rows:
        if row["step"] == last:
            problems.setdefault(row["problem"], []).append(row)
    shown = [_problem(problem, generations) for problem, generations in list(problems.items())[:PROBLEMS_SHOWN]]
    return f"<h3>{html.escape(label)} <span class='muted'>step {last}</span></h3>{''.join(shown)}"


def _problem(problem: str, generations: Rows) -> str:
    clusters: dict[int | None, Rows] = {}
    for row in generations:
        clusters.setdefault(row["cluster"], []).append(row)
    correct = sum(row["reward"] == 1 for row in generations)
    strategies = len(clusters.keys() - {DEGENERATE_CLUSTER})
    clustering = "not clustered" if None in clusters else f"{strategies} clusters"
    about = f"{correct} of {len(generations)} correct, {clustering}"
    largest_first = sorted(clusters.items(), key=lambda item: (item[0] == DEGENERATE_CLUSTER, -len(item[1])))
    return (
        f"<details><summary>{html.escape(problem)} <span class='muted'>{about}</span></summary>"
        f"<pre>{html.escape(generations[0]['prompt'])}</pre>"
        f"{''.join(_cluster(cluster, members) for cluster, members in largest_first)}</details>"
    )


def _cluster(cluster: int | None, generations: Rows) -> str:
    name = {None: "Not clustered", DEGENERATE_CLUSTER: "Degenerate"}.get(cluster, f"Cluster {cluster}")
    size = f"{len(generations)} generation{'s' * (len(generations) > 1)}"
    return f"<h4>{name} <span class='muted'>{size}</span></h4>" + "".join(map(_generation, generations))


def _generation(row: Mapping[str, Any]) -> str:
    verdict = "right" if row["reward"] == 1 else "wrong"
    advantage = "no advantage" if row["advantage"] is None else f"advantage {row['advantage']:+.3f}"
    score = f"<span class='{verdict}'>reward {row['reward']:.3g}</span> · {advantage}"
    response = html.escape(row["response"])
    if len(row["response"]) <= INLINE_CHARACTERS and "\n" not in row["response"]:
        return f"<p><code>{response}</code> {score}</p>"
    number = f"<span class='muted'>generation {row['generation']}</span>"
    return f"<details><summary>{score} {number}</summary><pre>{response}</pre></details>"


if __name__ == "__main__":
    sys.exit(main())
