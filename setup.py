"""Package metadata. Install with `pip install -e '.[test]'` for development, or '.[gpu]' or '.[tpu]' for accelerators.

Lower bounds are the oldest versions that pass the tests (`bash launch/lock.sh lowest` lists them). Upper bounds exclude
the next release that may contain breaking changes. launch/lock.txt contains one exact version of each package for all
Python versions and extras. Add `-c launch/lock.txt` to install these versions.
"""

from setuptools import find_packages, setup

setup(
    name="poly_epo_jax",
    version="0.1.0",
    description="Set reinforcement learning for language models that explore (Poly-EPO), in JAX",
    license="Apache-2.0",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["poly_epo_jax", "poly_epo_jax.*"]),
    package_data={
        "poly_epo_jax": ["py.typed", "report/assets/*", "judges/rubric.md", "tasks/words/*", "bench/aot/*.txtpb"]
    },
    install_requires=[
        "datasets>=4.0,<6",
        "flax>=0.12.8,<0.13",
        "grain>=0.2.18,<0.3",
        "httpx>=0.28,<1",
        "huggingface_hub>=1.0,<3",
        "jax>=0.10.2,<0.13",  # 0.10.2 is the last version for Python 3.11
        "jaxtyping>=0.3,<0.4",
        "jinja2>=3.1,<4",  # an optional dependency of transformers, for chat templates
        "math-verify[antlr4_13_2]>=0.9,<0.10",
        "matplotlib>=3.9,<4",
        "ml-collections>=1.1,<2",
        "numpy>=2.0,<3",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12,<0.13",
        "pyarrow>=20,<27",
        "rich>=14,<16",
        "safetensors>=0.6,<1",
        "scipy>=1.14,<2",
        "sympy>=1.13,<2",
        "tensorboardX>=2.6.5,<3",
        "tokenizers>=0.22,<1",
        "transformers>=5.0,<6",
    ],
    extras_require={
        # torch, the reference of tests/model/test_transformers.py, is not listed, because the build on PyPI installs
        # 5 GB of CUDA libraries. launch/test.sh installs the CPU build without dependencies. It imports networkx.
        "test": [
            "beartype>=0.22,<0.24",
            "networkx>=3.4,<4",
            "packaging>=24",
            "pyright>=1.1.400,<2",
            "pytest>=8.4,<10",
            "pytest-xdist>=3.6,<4",
            "ruff>=0.14,<1",
            "setuptools>=77",
        ],
        # torch, which only rollouts.weight_sync=tensor requires, is not listed because its exact pins of CUDA libraries
        # would restrict those of JAX, and on Python 3.11 it would install a second version of CUDA.
        "gpu": ["jax[cuda13]"],
        "tpu": ["jax[tpu]"],
        # Imports of google-jetstream, which third_party/jetstream/setup.sh installs without its dependencies.
        "jetstream": ["grpcio>=1.70,<2", "prometheus-client<1", "protobuf>=5,<8", "shortuuid>=1,<2", "tiktoken<1"],
        "wandb": ["wandb<1"],
    },
)
