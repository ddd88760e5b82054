"""Computes logits and gradients of tiny models of all families with transformers on torch, and stores them.

    python tests/model/make_references.py [CASE ...]

Without arguments, all cases of `families.py` are computed. launch/torch.sh installs torch. The files of the folder
`references` are tested without torch by test_references.py, and compared with this script by test_families.py.
"""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# transformers searches for torch when it is imported.
sys.path.append(os.path.join(sys.prefix, "torch"))

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from families import FAMILIES, REFERENCES, Reference, make_config, sequences, store, summarize, write_model
from safetensors import safe_open


def tensor_shapes(case: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in folders that transformers writes."""
    model = getattr(transformers, f"{FAMILIES[case][0]}ForCausalLM")(make_config(case))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def load_transformer(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def transformer_logits(model: Any) -> list[Any]:
    return [model(torch.as_tensor(tokens)[None]).logits[0].float() for tokens in sequences()]


def separate_experts(model: Any) -> Iterator[tuple[str, Any]]:
    """Yields the gradients by their names in model folders, where each expert has separate tensors."""
    for name, parameter in model.named_parameters():
        folder, _, stack = name.partition(".experts.")
        names = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(stack)
        for index, expert in enumerate(parameter.grad if names else ()):
            for part, gradient in zip(names or (), expert.chunk(len(names or ())), strict=True):
                yield f"{folder}.experts.{index}.{part}.weight", gradient
        if not names:
            yield name, parameter.grad


def logits_and_gradients(model: Any) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """Returns the logits of each sequence, and the gradients of sum(sin(logits)) by the names of model folders."""
    logits = transformer_logits(model)
    torch.stack([torch.sin(x).sum() for x in logits]).sum().backward()
    gradients = {name: gradient.numpy().copy() for name, gradient in separate_experts(model)}
    model.zero_grad()
    return [x.detach().numpy() for x in logits], gradients


def compute_reference(case: str) -> Reference:
    shapes = tensor_shapes(case)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), case, shapes)
        logits, gradients = logits_and_gradients(load_transformer(Path(folder)))
    assert gradients.keys() == shapes.keys()
    return Reference(shapes, np.concatenate(logits), summarize(gradients))


def main(cases: Sequence[str]) -> None:
    torch.set_num_threads(1)
    REFERENCES.mkdir(exist_ok=True)
    for case in cases or FAMILIES:
        store(compute_reference(case), case)
        print(f"{case}: {(REFERENCES / f'{case}.safetensors').stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
