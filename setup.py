"""pip install -e '.[test]' for development; '.[gpu]' or '.[tpu]' for accelerators."""

from setuptools import find_packages, setup

setup(
    name="poly_epo_jax",
    version="0.1.0",
    description="Set reinforcement learning for language models that explore (Poly-EPO), in JAX",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["poly_epo_jax", "poly_epo_jax.*"]),
    package_data={"poly_epo_jax": ["report.html.template", "report*.css", "report*.js", "judges/rubric.md"]},
    install_requires=[
        "absl-py",
        "flax>=0.12",
        "datasets>=4.0",
        "grain>=0.2.18",
        "httpx>=0.28",
        "huggingface_hub",
        "jax>=0.10",
        "jaxtyping>=0.3",
        "math-verify[antlr4_13_2]>=0.9",
        "matplotlib>=3.9",
        "ml-collections>=1.1",
        "numpy>=2.0",
        "optax>=0.2.8",
        "orbax-checkpoint>=0.12",
        "pyarrow",
        "rich>=14",
        "safetensors>=0.6",
        "sympy",
        "tensorboardX>=2.6.5",
        "tokenizers>=0.22",
        "transformers>=5.0",
    ],
    extras_require={
        # torch is the reference that logits are compared with; nothing else needs it.
        "test": ["beartype>=0.22", "pyright>=1.1.400", "pytest>=8.4", "ruff>=0.14", "torch==2.13.0"],
        "gpu": ["jax[cuda13]>=0.10", "tokamax>=0.0.17"],
        "tpu": ["jax[tpu]>=0.10"],
        # What google-jetstream imports; third_party/jetstream/setup.sh installs it beside, without its dependencies.
        "jetstream": ["grpcio>=1.70", "prometheus-client", "protobuf>=5", "shortuuid", "tiktoken"],
        "wandb": ["wandb"],
    },
)
