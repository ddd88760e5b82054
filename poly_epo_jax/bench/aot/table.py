"""Prints the estimated costs of compiled programs as tables."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from poly_epo_jax.bench.console import console_table

SMALL_BYTES = 10**7  # Groups of collectives that send fewer bytes in total are omitted from the table.


def show_programs(found: Mapping[str, Any], console: Console) -> None:
    """Prints the results of `command.compile_for`.

    Args:
      found: Results of `compile_for`.
      console: Console to which the tables are printed.
    """
    mesh = " x ".join(f"{axis} {size}" for axis, size in found["mesh"].items())
    console.print(
        f"{found['machine']}, mesh {mesh}; {found['model']}, {found['num_layers']} layers, remat={found['remat']}, "
        f"{found['rows_per_device']} rows of {found['row_tokens']:,} tokens on each device. Compiled, but not run.",
        soft_wrap=True,
    )
    console.print(_programs(found["programs"]))
    for sentence in _kernel_sentences(found["programs"]):
        console.print(sentence, soft_wrap=True)
    console.print(_collectives(found["programs"]))
    console.print(_costs(found["programs"]["gradient"]))
    step = found["step"]
    ratio = step["attention_work_ratio"]
    console.print(
        f"Update of one step: at least {step['update_seconds']:.1f} s, MFU {step['update_mfu']:.0%} (gradient: "
        f"{step['gradient_mfu']:.0%}), for sequences of {step['tokens_per_sequence']:,.0f} tokens on average. On TPUs, "
        "XLA estimates the time of fusions. All other times are computed from vendor specifications for matmuls, "
        "memory, kernels, and links that are waited for."
        + (f" Attention kernels compute {ratio:.2f} times the visible pairs of tokens." if ratio else ""),
        soft_wrap=True,
    )


def _programs(programs: Mapping[str, Mapping[str, Any]]) -> Table:
    table = console_table(("program",), ("GB", "plan", "TFLOP", "useful", "s", "XLA", "arithmetic", "kernels", "links"))
    for name, program in programs.items():
        memory, seconds = program["memory"], program["seconds"]
        table.add_row(
            name,
            f"{memory['total'] / 1e9:.1f}",
            f"{memory['planned'] / 1e9:.1f}" if memory["planned"] else "",
            f"{program['product_tflop'] + program['kernel_tflop']:.4g}",
            f"{program['useful_share']:.0%}" if program["useful_share"] else "",
            f"{program['total_seconds']:.3g}",
            *(f"{seconds[kind]:.3g}" for kind in ("xla", "arithmetic", "kernels", "links")),
        )
    return table


def _kernel_sentences(programs: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    for name, program in programs.items():
        kernels = ", ".join(f"{count} {kernel}" for kernel, count in program["kernels"].items())
        logits = ", ".join(program["vocabulary_arrays"])
        if kernels:
            yield f"{name} runs the kernels {kernels}."
        if logits:
            yield f"{name} has arrays with the logits of all its tokens: {logits}."


def _costs(program: Mapping[str, Any]) -> Table:
    origins = "largest costs of the gradient, by origin"
    table = console_table((origins,), ("s", "fraction"), wrapped=origins)
    for origin, seconds in program["largest_costs"].items():
        table.add_row(origin, f"{seconds:.3f}", f"{seconds / program['total_seconds']:.0%}")
    return table


def _collectives(programs: Mapping[str, Mapping[str, Any]]) -> Table:
    table = console_table(
        ("program", "collective", "dtype", "location", "mode"), ("executions", "GB sent", "exposed seconds")
    )
    for name, program in programs.items():
        for one in program["collectives"]:
            if one["sent_bytes"] >= SMALL_BYTES:
                table.add_row(
                    name,
                    one["kind"],
                    one["type"],
                    "in a loop" if one["in_loop"] else "outside loops",
                    "asynchronous" if one["asynchronous"] else "synchronous",
                    f"{one['runs']:,}",
                    f"{one['sent_bytes'] / 1e9:.2f}",
                    f"{one['waited_seconds']:.3f}",
                )
    return table
