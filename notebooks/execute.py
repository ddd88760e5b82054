"""Executes the notebooks and stores their outputs, with a digest of the code that produced them.

python notebooks/execute.py

Requires the packages nbclient, ipykernel and ipywidgets. The notebooks write to notebooks/runs/.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent


def code_digest(cells: list[dict[str, Any]]) -> str:
    """Returns the SHA-256 digest of the code cells of a notebook."""
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def execute(path: Path) -> None:
    """Executes a notebook in its folder and writes its outputs and the digest of its code."""
    import nbclient  # pyright: ignore[reportMissingImports]
    import nbformat  # pyright: ignore[reportMissingImports]

    notebook = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=3600, coalesce_streams=True, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.clear()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "code_sha256": code_digest(notebook.cells),
    }
    path.write_text(nbformat.writes(notebook).replace(f"{path.parent}/", ""))  # outputs contain absolute paths


if __name__ == "__main__":
    for name in ("advantages", "quickstart", "free_accelerators"):
        execute(FOLDER / f"{name}.ipynb")
