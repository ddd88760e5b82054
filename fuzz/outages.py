"""Tests training with two SGLang servers that are killed or suspended, and a judge with 50% invalid replies.

Each outage is an attempt: training must continue with both servers after the server has recovered. At the end, the run
is stopped and resumed. No step may be missing, all responses must be sampled with the current weights, and the outages
must only be visible in the counters. Requires `bash third_party/sglang/setup.sh cpu`.
"""

import itertools
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from outcome import Outcome
from sglang_servers import SGLangServer, running
from training_runs import as_flags

from configs import polynomial
from poly_epo_jax.parallel.sharding import make_mesh
from poly_epo_jax.records.run_folder import METRICS, read_rows
from poly_epo_jax.startup.base_policy import base_policy
from poly_epo_jax.startup.read_config import make_task, read_config

ROOT = Path(__file__).parents[1]
TIMEOUT = 240.0  # seconds until an expected event, on a busy machine
FLAGS = ("--max-total-tokens", "32768", "--max-running-requests", "128", "--context-length", "64")
SETTINGS: dict[str, Any] = {
    "base.clean_steps": 200,
    "base.noisy_steps": 20,
    "train.num_steps": 10_000,
    "train.prompts_per_batch": 16,
    "train.prompts_per_minibatch": 8,
    "optimizer.schedule": "constant",
    "eval.every": 0,
    "checkpoint.every": 20,
    "rollouts.name": "sglang",
    "rollouts.weights_dtype": "float32",
    "rollouts.max_concurrent": 128,
    "rollouts.timeout_seconds": 10.0,
    "judge.name": "llm",
    "judge.options.attempts": 12,
}
INVALID_REPLIES: tuple[Callable[[dict[str, Any]], Any], ...] = (
    lambda reply: "I would rather not.",
    lambda reply: json.dumps(reply)[:-7],
    lambda reply: json.dumps({name: verdict | {"cluster": 77} for name, verdict in reply.items()}),
    lambda reply: json.dumps(dict(itertools.islice(reply.items(), 3))),
    lambda reply: None,
)


class Judge(BaseHTTPRequestHandler):
    """Clusters responses by their text. Half of the replies, selected at random, are invalid or HTTP errors."""

    random = random.Random(0)

    def do_GET(self) -> None:
        self._send(200, {"data": [{"id": "judge"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = body["messages"][-1]["content"]
        texts = re.findall(r"^=== response \d+ (\w+) ===\n(.*?)\n=== end", shown, re.DOTALL | re.MULTILINE)
        numbers: dict[str, int] = {}
        verdicts = [numbers.setdefault(text, len(numbers) + 1) for _, text in texts]
        reply = {str(i): {"rationale": "Its text.", "cluster": one} for i, one in enumerate(verdicts, start=1)}
        if self.random.random() < 0.5:
            change = self.random.choice((*INVALID_REPLIES, None))
            if change is None:
                self._send(500, {})
                return
            content = change(reply)
        else:
            content = json.dumps(reply)
        self._send(200, {"choices": [{"finish_reason": "stop", "message": {"role": "assistant", "content": content}}]})

    def _send(self, status: int, answer: Any) -> None:
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Disables logging, which would print a line per request."""


class Training:
    """A training run in a separate process."""

    def __init__(self, folder: Path, settings: dict[str, Any]):
        self.folder, self._log = folder, folder.with_suffix(".log")
        flags = as_flags(settings | {"workdir": folder})
        self._command = [sys.executable, "-m", "poly_epo_jax.main", "--config=configs/polynomial.py", *flags]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **changes: Any) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                self._command + as_flags(changes), cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        return self.process

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def steps(self) -> int:
        path = self.folder / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def output(self) -> str:
        return self._log.read_text()

    def continues(self, enough: Callable[[], bool] = lambda: True) -> bool:
        """Waits for three more steps and for `enough`, and returns True if both happen before the timeout."""
        before, deadline = self.steps(), time.monotonic() + TIMEOUT
        while self.steps() < before + 3 or not enough():
            if time.monotonic() > deadline or self.process is None or self.process.poll() is not None:
                return False
            time.sleep(0.1)
        return True


def attack(random: random.Random, folder: Path) -> Iterator[Outcome]:
    """Starts servers, judge and training, causes the outages in random order, and checks the resumed run."""
    with ExitStack() as stack:
        Judge.random = random
        judge = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
        stack.callback(judge.shutdown)
        threading.Thread(target=judge.serve_forever, daemon=True).start()

        config = polynomial.get_config()
        recipe = {key: value for key, value in SETTINGS.items() if key.startswith("base.")}
        config.update_from_flattened_dict(recipe | {"base.cache_dir": str(folder / "base")})
        sections = read_config(config)
        model = base_policy(sections, make_task(sections.task), make_mesh(1, 1, 1))
        logs = [folder / f"server-{i}.log" for i in range(2)]
        servers = stack.enter_context(running([SGLangServer(model, log, *FLAGS) for log in logs]))

        settings = SETTINGS | {
            "base.cache_dir": folder / "base",
            "compilation_cache_dir": folder / "compiled",
            "rollouts.urls": ",".join(server.url for server in servers),
            "rollouts.weights_dir": folder / "weights",
            "judge.url": f"http://127.0.0.1:{judge.server_address[1]}",
        }
        training = Training(folder / "run", settings)
        stack.callback(training.close)
        training.start()
        if not training.continues():
            yield Outcome("start", False, training.output()[-3000:])
            return
        outages = [*itertools.product(("killed", "hung"), servers)] * 3
        for kind, server in random.sample(outages, len(outages)):
            yield _outage(kind, server, training, random.uniform(0, 2 * SETTINGS["rollouts.timeout_seconds"]))
        yield _end(training)


def _outage(kind: str, server: SGLangServer, training: Training, seconds: float) -> Outcome:
    """Kills or suspends a server, and checks that training continues with it.

    Args:
      kind: "killed" restarts the server, "hung" suspends it for `seconds`.
      server: The server.
      training: The training run.
      seconds: Duration of a suspension, below or above the timeout of requests.
    """
    if kind == "killed":
        server.kill()
        server.start()
    else:
        server.send(signal.SIGSTOP)
        time.sleep(seconds)
        server.send(signal.SIGCONT)
    answered = len(server.requests())
    held = training.continues(lambda: "generate" in server.requests()[answered:])
    return Outcome(f"a server {kind}", held, f"training does not use the server again\n{training.output()[-3000:]}")


def _end(training: Training) -> Outcome:
    """Stops the run, resumes it for two steps, and checks that the outages are only visible in its counters."""
    assert training.process is not None
    training.process.send_signal(signal.SIGTERM)
    codes = [training.process.wait()]
    rows = training.steps()
    codes.append(training.start(**{"train.num_steps": rows + 2}).wait())
    rows = read_rows(training.folder / METRICS)
    counted = {key: sum(row[key] for row in rows) for key in rows[0] if key.startswith(("rollouts/", "judge/"))}
    held = (
        codes == [128 + signal.SIGTERM, 0]
        and [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        and max(row["mismatch/max"] for row in rows) < 1e-3
        and {row["response/staleness"] for row in rows} == {0.0}
        and counted["rollouts/resampled"] + counted["rollouts/server_failures"] > 0
        and "Traceback" not in training.output()
    )
    print(f"outages: {len(rows)} steps; counted {json.dumps(counted)}", file=sys.stderr)
    return Outcome("the run", held, f"codes {codes}, {len(rows)} steps, {counted}\n{training.output()[-3000:]}")
