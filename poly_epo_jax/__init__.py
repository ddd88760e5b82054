"""Set reinforcement learning for language models in JAX (Poly-EPO)."""

import os

# Of transformers only the tokenizers are used, so it need not advise to install PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
