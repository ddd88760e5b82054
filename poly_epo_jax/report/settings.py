"""Builds tables of the shared and differing configuration keys and versions of runs, as HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from poly_epo_jax.config.section import flat
from poly_epo_jax.report.document import text_table


def settings_section(
    configs: Mapping[str, Mapping[str, Any]], versions: Mapping[str, Sequence[Mapping[str, str]]]
) -> str:
    """Returns HTML with differing and shared configuration keys and the versions of runs.

    Args:
      configs: Configurations by run. Empty configurations are ignored. If all are empty, the section is empty.
      versions: Versions by run, see system/versions.py.
    """
    tables = {label: flat(config) for label, config in configs.items() if config}
    if not tables:
        return ""
    first = next(iter(tables.values()))
    all_keys = dict.fromkeys(key for values in tables.values() for key in values)
    keys = [key for key in all_keys if any(values.get(key) != first.get(key) for values in tables.values())]
    rows = [[label, *(_value_text(values.get(key)) for key in keys)] for label, values in tables.items()]
    differences = ""
    if keys:
        summary = f"Differing configuration keys of {len(tables)} runs: {escape(', '.join(keys))}"
        differences = f"<details><summary>{summary}</summary>{text_table(['run', *keys], rows)}</details>"
    elif len(tables) > 1:
        differences = "<p>All runs have the same configuration.</p>"
    shared = text_table(
        ["key", "value"], [[key, _value_text(value)] for key, value in first.items() if key not in keys]
    )
    return (
        '<section id="settings"><h2>Configuration and versions</h2>'
        '<p class="muted">Results of runs are comparable if their configurations differ only in the compared keys. '
        f"Folder paths are omitted.</p>{differences}"
        f"<details><summary>{'Shared configuration' if len(tables) > 1 else 'Configuration'}</summary>{shared}"
        f"</details>{_versions_table(versions)}</section>"
    )


def _versions_table(versions: Mapping[str, Sequence[Mapping[str, str]]]) -> str:
    """Returns an HTML table with a row per distinct set of versions and the runs that were trained with it."""
    runs_of: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for label, used in versions.items():
        for one in used:
            runs_of.setdefault(tuple((str(name), str(value)) for name, value in one.items()), []).append(label)
    if not runs_of:
        return '<p class="muted">The runs do not record the versions that they were trained with.</p>'
    names = list(dict.fromkeys(name for used in runs_of for name, _ in used))
    everyone = sum(bool(used) for used in versions.values())
    rows = []
    for used, labels in runs_of.items():
        runs = f"all {everyone} runs" if len(labels) == everyone > 1 else ", ".join(labels)
        rows.append([runs, *(dict(used).get(name, "") or "-" for name in names)])
    several = "" if len(runs_of) == 1 else "<p><b>Not all steps were trained with the same versions.</b></p>"
    note = '<p class="muted">A commit that ends in + had uncommitted changes.</p>'
    return f"{several}{text_table(['runs', *names], rows)}{note}"


def _value_text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
