"""Copies a model whose output head shares the weight of the embedding, and separates both. Called by launch/node.sh."""

import dataclasses
import sys
from pathlib import Path

from safetensors.flax import save_file

from poly_epo_jax.model.architectures import ARCHITECTURES
from poly_epo_jax.model.hf import exported_tensors, load_params, read_model_config
from poly_epo_jax.model.hf_files import TOKENIZER_FILES, copy_files, new_folder
from poly_epo_jax.model.policy import find_model
from poly_epo_jax.system.json_files import read_object, write_json


def main(model: str, folder: Path) -> None:
    """Prints the path of a model or, if its embeddings are tied, of an untied copy in float32.

    Args:
      model: Model folder, or name on the Hugging Face Hub.
      folder: Folder of the copy. An existing copy is replaced.
    """
    source = find_model(model)
    config = read_model_config(source, param_dtype="float32")
    if not config.tie_word_embeddings:
        print(source)
        return
    params, untied = load_params(source, config), dataclasses.replace(config, tie_word_embeddings=False)
    with new_folder(folder, replace=True) as new:
        copy_files(source, new, ("generation_config.json", *TOKENIZER_FILES))
        written = read_object(source / "config.json", "create or download the model folder again")
        if "text_config" in written:  # The copy of a folder with a vision model contains the language model only.
            names = {"model_type": config.family, "architectures": [ARCHITECTURES[config.family].class_name]}
            written = written["text_config"] | names
        write_json(new / "config.json", written | {"tie_word_embeddings": False})
        tensors = dict(exported_tensors(params | {"untied_head": params["embed"]}, untied, "float32"))
        save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    print(
        f"{model} has tied embeddings, and vLLM does not update its output head on CPUs. The untied copy {folder} is "
        "served and trained instead.",
        file=sys.stderr,
    )
    print(folder)


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]))
    except (OSError, ValueError) as error:
        sys.exit(f"Error: {error}")
