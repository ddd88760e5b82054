"""Fake SGLang servers that load pushed folders, and compute tokens with these weights and a prefix cache in bfloat16.

Faults are attributes. They leave a server with other weights, keys or values than its weight version claims.
"""

import dataclasses
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import numpy as np
from fake_servers import answer_to_get
from fakes import TINY

from poly_epo_jax.model import hf
from poly_epo_jax.model.config import ModelConfig
from poly_epo_jax.model.layer import normalize
from poly_epo_jax.model.rope import make_rotation, rotate
from poly_epo_jax.model.transformer import init_params
from poly_epo_jax.types import Params

ROUTER = "http://router"
URLS = ["http://a", "http://b"]
MODEL = dataclasses.replace(TINY, vocab_size=64, hidden_size=32, mlp_size=64, num_layers=3)
ROW = 64  # Number of tokens of the compiled forward pass.


def adam_step(params: Params, seed: int, learning_rate: float = 1e-6) -> Params:
    """Returns the weights after an Adam step, which first changes every weight by the learning rate."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + np.float32(learning_rate) * rng.choice([-1, 1], x.shape).astype(np.float32), params
    )


def initial_params(config: ModelConfig = MODEL) -> Params:
    """Returns random weights in float32 as NumPy arrays."""
    return jax.tree.map(np.asarray, init_params(config, 1))


class PolicyServers:
    """Fake servers of `URLS`, and a router that lists them as its workers.

    Args:
      config: Configuration of the model.

    Attributes:
      versions: Weight version that each server reports.
      prompts: Number of prompts that each server has answered, without probes.
      misses: Servers that report each update, but do not load it.
      keeps_cache: Servers that do not flush their prefix cache.
      keeps_head: Servers that do not update the output head of a model with tied embeddings.
      noisy: Servers whose equal requests have different log-probabilities.
      dying: Servers that do not respond to prompts.
      checksums: "full", "packed" (only norms have checksums, like vLLM on CPUs), "other" (another algorithm, like
        SGLang on GPUs) or "none" (the route does not exist).
      quantization: Quantization that the servers report.
    """

    def __init__(self, config: ModelConfig = MODEL):
        self.config = dataclasses.replace(config, dtype="bfloat16", param_dtype="bfloat16")
        initial = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), initial_params(config))
        self.weights: dict[str, Any] = dict.fromkeys(URLS, initial)
        self.heads = {url: self.weights[url]["embed"] for url in URLS}
        self.versions = dict.fromkeys(URLS, "default")
        self.caches: dict[str, dict[str, Any]] = {url: {} for url in URLS}
        self.prompts = dict.fromkeys(URLS, 0)
        self.misses, self.keeps_cache, self.keeps_head, self.noisy = set[str](), set[str](), set[str](), set[str]()
        self.dying = set[str]()
        self.checksums, self.quantization = "full", None
        self.noise = np.random.default_rng(0)

    def handle(self, request: httpx.Request) -> httpx.Response:
        """Responds to a request of the trainer."""
        url, endpoint = f"http://{request.url.host}", request.url.path.strip("/")
        if url == ROUTER:
            workers = [{"url": worker} for worker in URLS]
            return httpx.Response(200, json={"workers": workers} if endpoint == "workers" else {})
        if request.method == "GET":
            info = {"weight_version": self.versions[url], "quantization": self.quantization}
            return answer_to_get(request.url.path, **info)
        body = json.loads(request.content)
        match endpoint:
            case "update_weights_from_disk":
                self._load(url, Path(body["model_path"]))
                self.versions[url] = body["weight_version"]
            case "update_weight_version":
                self.versions[url] = body["new_version"]
            case "weights_checker":
                return self._checksums(url)
            case "generate":
                return self._generate(url, body)
        return httpx.Response(200, json={"success": True})

    def _load(self, url: str, folder: Path) -> None:
        if url not in self.misses:
            self.weights[url] = hf.load_params(folder, self.config)
            if url not in self.keeps_head:
                self.heads[url] = self.weights[url]["embed"]
        if url not in self.keeps_cache:
            self.caches[url] = {}

    def _checksums(self, url: str) -> httpx.Response:
        if self.checksums == "none":
            return httpx.Response(404)
        parts: dict[str, bytes] = {}
        order = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        tensors = dict(hf.exported_tensors(self.weights[url], self.config, "bfloat16"))
        for name in sorted(tensors, key=lambda name: next((i for i, one in enumerate(order) if one in name), 0)):
            fused = re.sub(r"\b[qkv]_proj", "qkv_proj", re.sub(r"\b(gate|up)_proj", "gate_up_proj", name))
            parts[fused] = parts.get(fused, b"") + np.asarray(tensors[name]).tobytes()
        if self.checksums == "packed":
            parts = {name: content if "norm" in name else b"" for name, content in parts.items()}
        algorithm = hashlib.md5 if self.checksums == "other" else hashlib.sha256
        digests = {name: algorithm(content).hexdigest()[:16] for name, content in parts.items()}
        return httpx.Response(200, json={"success": True, "ranks": [{"checksums": digests}]})

    def _generate(self, url: str, body: dict[str, Any]) -> httpx.Response:
        is_list = isinstance(body["sampling_params"], list)
        prompts = body["input_ids"] if is_list else [body["input_ids"]]
        sampling = body["sampling_params"][0] if is_list else body["sampling_params"]
        is_probe = sampling["temperature"] == 0
        if url in self.dying and not is_probe:
            raise httpx.ConnectError("dead")
        self.prompts[url] += not is_probe
        answers = [self._complete(url, ids, sampling["max_new_tokens"], body.get("cache_salt")) for ids in prompts]
        return httpx.Response(200, json=answers if is_list else answers[0])

    def _complete(self, url: str, prompt_ids: list[int], max_tokens: int, salt: str | None) -> dict[str, Any]:
        """Returns the most likely tokens. Keys and values of cached prompt tokens are not recomputed."""
        cached_ids, cached = self.caches[url].get(salt or "", ([], None))
        equal = [one == other for one, other in zip(cached_ids, prompt_ids[:-1], strict=False)]
        num_cached = int(np.argmin([*equal, False]))
        head = self.weights[url].get("untied_head", self.heads[url])
        ids, logprobs, keys_and_values = list(prompt_ids), [], None
        for _ in range(max_tokens):
            row = np.zeros(ROW, np.int32)
            row[: len(ids)] = ids
            logits, keys_and_values = _forward(self.config, self.weights[url], head, row, num_cached, cached)
            scores = np.asarray(jax.nn.log_softmax(logits[len(ids) - 1]), np.float64)
            ids.append(int(scores.argmax()))
            logprobs.append(float(scores.max()) - (1e-4 * self.noise.random() if url in self.noisy else 0))
        self.caches[url][salt or ""] = ids, keys_and_values
        info = {"weight_version": self.versions[url], "finish_reason": {"type": "length"}}
        info |= {"completion_tokens": max_tokens, "prompt_tokens": len(prompt_ids), "cached_tokens": num_cached}
        new = ids[len(prompt_ids) :]
        info |= {"output_token_logprobs": [[p, one, None] for p, one in zip(logprobs, new, strict=True)]}
        return {"output_ids": new, "meta_info": info}


@functools.partial(jax.jit, static_argnums=0)
def _forward(config: ModelConfig, params: Params, head: Any, ids: Any, num_cached: Any, cached: Any) -> Any:
    """Returns the logits [T, V], and keys and values of all layers, of which the first `num_cached` are `cached`."""
    positions = jnp.arange(len(ids))
    visible = positions[:, None] >= positions[None]
    rotation = make_rotation(config.ropes[0], config.head_dim, positions)
    x = params["embed"][ids]
    keys_and_values = []
    for layer in range(config.num_layers):
        w = {name: weight[layer] for name, weight in params["layers"].items()}
        h = normalize(config, x, w["attention_norm"])
        q, k, v = (jnp.einsum("td,dnh->tnh", h, w[name]) for name in "qkv")
        q, k = (normalize(config, y, w[name]) for y, name in ((q, "q_norm"), (k, "k_norm")))
        q, k = (rotate(y, rotation) for y in (q, k))
        if cached is not None:
            is_cached = (positions < num_cached)[:, None, None]
            k, v = (jnp.where(is_cached, old, new) for old, new in zip(cached[layer], (k, v), strict=True))
        keys_and_values.append((k, v))
        k, v = (jnp.repeat(y, config.num_heads // config.num_kv_heads, axis=1) for y in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k).astype(jnp.float32) * config.head_dim**-0.5
        attended = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1).astype(x.dtype)
        x = x + jnp.einsum("nts,snh,nhd->td", attended, v, w["o"])
        h = normalize(config, x, w["mlp_norm"])
        x = x + jnp.einsum("tm,md->td", jax.nn.silu(h @ w["gate"]) * (h @ w["up"]), w["down"])
    x = normalize(config, x, params["norm"])
    return (x @ head.T).astype(jnp.float32), keys_and_values
