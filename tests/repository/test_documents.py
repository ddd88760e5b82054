"""Tests that all commands in README.md, docs/ and CONTRIBUTING.md run as documented, with flags that shorten them.

The commands run in document order in one copy of the tracked files, and later commands require the earlier ones. Slow
tests run commands of the package in forks of a process that has executed their imports. The copy has its own .venv,
into which setup_env.sh and pip only install the copy. All other packages are those of the environment that runs this
test, so the download of packages is not tested here (.ci/run does this).
"""

import os
import re
import shlex
import shutil
import site
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import quick_compiles
from fork_server import ForkServer
from training_runs import SETTINGS, as_flags
from user_packages import user_variables

from poly_epo_jax import cli

ROOT = Path(__file__).parents[2]
SECTIONS = ("tutorials", "how_to", "explanation", "reference")
PAGES = [page for section in SECTIONS for page in sorted((ROOT / "docs" / section).rglob("*.md"))]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "README.md", *PAGES, ROOT / "CONTRIBUTING.md"]
CODE = re.compile(
    r"^```(?P<language>\w*)\n(?P<fence>.*?)^```$|^ {4}(?P<indented>[^\n]+)$|`(?P<inline>[^`]+)`",
    re.DOTALL | re.MULTILINE,
)
INLINE = re.compile(r"([A-Z]+=\S+ )*(python -m|python benchmarks/|python fuzz |bash|sbatch|source\b|pip install) ?")
SMALL = " ".join(
    as_flags({key: value for key, value in SETTINGS.items() if key != "task.options"} | {"train.num_steps": 2})
)
PROBLEMS = "--config.task.options.num_train=28 --config.task.options.num_held_out=8"
USUAL_FOLDER = " && mv runs/evaluation-2-steps runs/evaluation"
"""Moves the evaluations of a shortened quick start to the folder of the complete one."""
FEW = "--num_generations=2 --max_problems=4"
EVALUATORS = "tests/examples/test_evaluators.py"
OWN = "tests/examples/test_own_problems.py"
PEERS = "manual: creates environments of several GB with torch, Tunix and TRL"


@dataclass(frozen=True)
class Rule:
    """The expected result of all commands that begin with `starts`, unless a longer rule applies.

    Attributes:
      starts: Beginning of the command.
      flags: Flags that shorten the command.
      says: Text in its output.
      error: Text in its error message, for commands that require another machine.
      elsewhere: The test that runs the command instead of this one, or the reason why no test does.
    """

    starts: str
    flags: str = ""
    says: str = ""
    error: str = ""
    elsewhere: str = ""


RULES = (
    Rule("LOCK=newest bash launch/test.sh", elsewhere="manual: installs the newest versions"),
    Rule(".venv-tpu/bin/python -m poly_epo_jax.bench", elsewhere="tests/bench/aot/test_compile_for.py, two layers"),
    Rule(".venv-evaluators/bin/pip", elsewhere="manual: downloads other projects"),
    Rule(".venv-evaluators/bin/lm_eval", elsewhere=EVALUATORS),
    Rule("LOCAL_API_KEY=none .venv-evaluators/bin/inspect", elsewhere=EVALUATORS),
    Rule("cp -r runs/policy", elsewhere=EVALUATORS),
    Rule("sed -i /split_special_tokens/d", elsewhere=EVALUATORS),
    Rule("bash launch/accelerator.sh", elsewhere="tests/accelerator/, with SMALL=1"),
    Rule("SMALL=1 bash launch/accelerator.sh", elsewhere="tests/accelerator/"),
    Rule("bash launch/compiler_env.sh", elsewhere="launch/test.sh all; downloads XLA compilers"),
    Rule("bash launch/lock.sh", elsewhere="manual: installs the newest versions"),
    Rule("bash launch/node.sh", elsewhere="tests/launch/test_node.py, with DEVICE=cpu; requires 4 x H200"),
    Rule(
        "bash launch/quickstart.sh",
        f"{SMALL} {PROBLEMS}{USUAL_FOLDER}",
        says="report: runs/report-2-steps/report.html",
    ),
    Rule("bash launch/site.sh", elsewhere=".ci/run; downloads mkdocs"),
    Rule("bash launch/smollm2.sh", elsewhere="tests/launch/test_smollm2.py; downloads a model"),
    Rule("bash launch/test.sh", elsewhere="runs this test"),
    Rule("bash launch/tpu.sh run", elsewhere="tests/launch/test_launch.py, with a stand-in for gcloud"),
    Rule("JUDGE_URL=http://HOST:30010 bash launch/", elsewhere="tests/launch/, with stand-ins for servers and gcloud"),
    Rule("JUDGE_URL=https://generativelanguage", elsewhere="manual: requires 4 x H200 and a key of Gemini"),
    Rule("bash launch/torch.sh", elsewhere="launch/test.sh all; downloads torch"),
    Rule("bash launch/reasoning_gym.sh", elsewhere="launch/test.sh all; downloads reasoning-gym"),
    Rule("bash launch/textarena.sh", elsewhere="launch/test.sh all; downloads TextArena"),
    Rule("bash third_party/sglang/serve.sh cpu", elsewhere="tests/support/sglang_servers.py"),
    Rule("bash third_party/sglang/serve.sh gpu", elsewhere="requires a GPU; see tests/rollouts/test_sleep.py"),
    Rule("bash third_party/sglang/setup.sh", elsewhere="launch/test.sh all, for cpu; downloads SGLang"),
    Rule("bash third_party/vllm/serve.sh", elsewhere="tests/support/vllm_servers.py, for cpu"),
    Rule("bash third_party/vllm/setup.sh", elsewhere="launch/test.sh all, for cpu; downloads vLLM"),
    Rule("SERVER=vllm bash launch/node.sh", elsewhere="tests/launch/test_node.py, with stand-ins for servers"),
    Rule("SERVER=vllm sbatch launch/slurm.sbatch", elsewhere="tests/launch/test_launch.py, with a stand-in for srun"),
    Rule("DEVICE=cpu SERVER=vllm bash launch/node.sh", elsewhere="tests/launch/test_node.py, with stand-ins"),
    Rule("python benchmarks/bands.py", elsewhere="manual: trains 8 runs of a recipe"),
    Rule("python benchmarks/mismatch.py", elsewhere="manual: starts real servers for 200 steps each"),
    Rule("python benchmarks/staleness.py", elsewhere="manual: starts a real server three times"),
    Rule("XLA_PYTHON_CLIENT_MEM_FRACTION=0.95 python -m poly_epo_jax.bench --plan", says="19.8 GB of 22.8 GB"),
    Rule(
        "XLA_PYTHON_CLIENT_ALLOCATOR=platform python -m poly_epo_jax.main --config=configs/gsm8k.py",
        error="'openai/gsm8k:main:test' cannot be reached",
    ),
    Rule("bash third_party/jetstream/setup.sh", elsewhere="launch/test.sh all; downloads JetStream"),
    Rule("cd poly_epo_jax", elsewhere="changes to the clone, which is the copy here"),
    Rule("git clone", elsewhere="manual: downloads the repository"),
    Rule("pip install", says="Successfully installed poly-epo-jax"),
    Rule("pip install pre-commit", elsewhere="manual: downloads another project"),
    Rule("pip install --pre", elsewhere="manual: downloads another project, for tests/rollouts/test_sglang_jax.py"),
    Rule("jupyter lab", elsewhere="manual: starts a server"),
    Rule("pip install jupyterlab", elsewhere="manual: downloads another project"),
    Rule("pip install torch", elsewhere="manual: installs CUDA, for rollouts.weight_sync=tensor"),
    Rule("pre-commit install", elsewhere="tests/repository/test_contributing.py runs the hooks"),
    Rule("pytest", elsewhere="runs this test"),
    Rule("poly-epo check-run", elsewhere="tests/check_run/; the runs here are shortened"),
    Rule("poly-epo explain", says="+0.098"),
    Rule("poly-epo recipes", says="polynomial"),
    Rule("poly-epo audit", elsewhere="tests/audit/test_audit.py, without language models"),
    Rule("poly-epo train --config=polaris --config.audit", elsewhere="tests/audit/test_audit.py, without servers"),
    Rule("poly-epo rejudge runs/planted", elsewhere="tests/examples/test_embedding_judge.py, with a tiny encoder"),
    Rule("poly-epo rejudge responses.jsonl", elsewhere="tests/rejudge/test_command.py, without language models"),
    Rule("poly-epo rejudge runs/polynomial-poly_epo", says="report: runs/rejudge/report.html"),
    Rule("poly-epo report", says="report.html"),
    Rule("poly-epo train --config=polynomial", SMALL, says="Done: runs/polynomial-poly_epo"),
    Rule("poly-epo train --config=polynomial:grpo", SMALL, says="Done: runs/polynomial-grpo"),
    Rule("python -m poly_epo_jax.bench --config=configs/polaris.py --plan_all_meshes", says="v6e-64"),
    Rule(
        "python -m poly_epo_jax.bench --config=configs/polaris.py:v5p-16 --plan",
        says="Plan: 8 x v5p, mesh data 1, fsdp 8, tensor 1, model.remat=dots, train.rows_per_device=1 of 16,384 "
        "tokens: 61 GB of 95 GB on each device.",
    ),
    Rule("python -m poly_epo_jax.bench --config=configs/polynomial.py", says="Written to runs/bench.json."),
    Rule("python -m poly_epo_jax.bench --plan --config=configs/polaris.py:v5p-32", says="Plan: 16 x v5p"),
    Rule("python -m poly_epo_jax.bench --plan --config=configs/gsm8k.py:rtx4090x1", says="tokens: 16 GB of 18 GB"),
    Rule("python -m poly_epo_jax.bench --plan --config=configs/polaris.py:rtx4090x1", says="tokens: 14.5 GB of 18 GB"),
    Rule("python -m poly_epo_jax.doctor --config=configs/polynomial.py", SMALL, says=" 0 failed, "),
    Rule(
        "python -m poly_epo_jax.doctor --config=configs/polynomial.py --output=runs/doctor.json",
        elsewhere="tests/doctor/test_whole.py",
    ),
    Rule(
        "python -m poly_epo_jax.doctor --config=configs/polynomial.py --config.judge.name=llm",
        elsewhere="tests/doctor/test_servers.py, with a fake judge",
    ),
    Rule("python -m poly_epo_jax.doctor --config=configs/polaris.py", error="failed: devices"),
    Rule(
        "python -m poly_epo_jax.evaluate --config=configs/countdown.py", f"{FEW} {PROBLEMS}", says="poly_epo_jax.report"
    ),
    Rule("python -m poly_epo_jax.evaluate --config=configs/polynomial.py", FEW, says="python -m poly_epo_jax.report"),
    Rule(
        "python -m poly_epo_jax.evaluate --config=configs/polaris.py",
        "--models=trained=http://127.0.0.1:1",  # where no other test has a server
        error="Failed to read the model of http://127.0.0.1:1",
    ),
    Rule("python -m poly_epo_jax.export", says="policy: runs/policy"),
    Rule("python -m poly_epo_jax.export runs/lora runs/adapter", says="adapter: runs/adapter"),
    Rule("python -m poly_epo_jax.export runs/lora runs/merged", says="policy: runs/merged"),
    Rule(
        "python -m poly_epo_jax.main --config=configs/countdown.py:max_rl",
        f"{SMALL} {PROBLEMS}",
        says="Done: runs/countdown-max_rl",
    ),
    Rule(
        "python -m poly_epo_jax.main --config=configs/countdown.py:grpo --config.optimizer.learning_rate=0",
        f"{SMALL} {PROBLEMS}",
        says="Done: runs/countdown-base",
    ),
    Rule("python -m poly_epo_jax.main --config=configs/gsm8k.py", error="'openai/gsm8k:main:test' cannot be reached"),
    Rule("python -m poly_epo_jax.main --config=configs/polaris.py", error="POLARIS-Project/Polaris-Dataset-53K"),
    Rule(
        "python -m poly_epo_jax.main --config=configs/polaris.py:h200x4",
        error="mesh.device_kind=h200, but the available",
    ),
    Rule("python -m poly_epo_jax.main --config=configs/polynomial.py", SMALL, says="Done: runs/polynomial-poly_epo"),
    Rule(
        "python -m poly_epo_jax.main --config=configs/polynomial.py --config.algo.objective=pass_at_n",
        SMALL,
        says="Done: runs/pass_at_n",
    ),
    Rule("python -m poly_epo_jax.main --config=configs/polynomial.py:grpo", SMALL, says="Done: runs/polynomial-grpo"),
    Rule(
        "python -m poly_epo_jax.main --config=configs/polynomial.py:grpo --config.optimizer.learning_rate=1e-4",
        SMALL,
        says="Done: runs/slow",
    ),
    Rule(
        "python -m poly_epo_jax.main --config=configs/polynomial.py:grpo --config.algo.advantages=max_rl",
        SMALL,
        says="Done: runs/max_rl",
    ),
    Rule("python -m poly_epo_jax.main --config=configs/polynomial.py --config.lora", SMALL, says="Done: runs/lora"),
    Rule(
        "python -m poly_epo_jax.main --config=configs/polynomial.py:grpo --config.algo.advantages=rep_exp",
        SMALL,
        says="Done: runs/rep_exp",
    ),
    Rule("python -m poly_epo_jax.main --config=my_sums.py", elsewhere="tests/examples/test_extending.py"),
    Rule("bash ~/poly_epo_jax/launch/smollm2.sh", elsewhere="tests/launch/test_smollm2.py; downloads a model"),
    Rule("mkdir ~/sentences", elsewhere=OWN),
    Rule("python make_words.py", elsewhere=OWN),
    Rule("python -m poly_epo_jax.bench --plan --config=sentences_gpu.py", elsewhere=OWN),
    Rule("python -m poly_epo_jax.evaluate --config=sentences.py", elsewhere=OWN),
    Rule("python -m poly_epo_jax.export runs/poly_epo policy", elsewhere=OWN),
    Rule("python -m poly_epo_jax.main --config=sentences.py", elsewhere=OWN),
    Rule("python -m poly_epo_jax.main --config=sentences_gpu.py", elsewhere="requires a GPU"),
    Rule("python -m poly_epo_jax.report runs/poly_epo runs/grpo", elsewhere=OWN),
    Rule("python -m poly_epo_jax.main --config=configs/prose.py", elsewhere="trains Qwen3-1.7B with a server"),
    Rule(
        "python -m poly_epo_jax.main --config=configs/smollm2.py",
        elsewhere="tests/launch/test_smollm2.py, two steps",
    ),
    Rule("python -m poly_epo_jax.main --help", says="train.num_steps"),
    Rule("python -m poly_epo_jax.report runs/smollm2", elsewhere="reads runs that this test does not create"),
    Rule("python -m poly_epo_jax.report", says="/report.html"),
    Rule("python -m poly_epo_jax.study studies/countdown", elsewhere="60, 40 and 60 runs; see the other studies"),
    Rule("python -m poly_epo_jax.study studies/categories.py", elsewhere="120 runs of a model with 135M weights"),
    Rule("python -m poly_epo_jax.study studies/guess_number.py", elsewhere="6 runs; see the other studies"),
    Rule("python -m poly_epo_jax.study studies/judge_bias.py", elsewhere="15 runs; see the other studies"),
    Rule("python -m poly_epo_jax.study studies/judge_errors.py", elsewhere="35 runs; see the other studies"),
    Rule("python -m poly_epo_jax.study studies/baselines.py", elsewhere="70 runs; see the other studies"),
    Rule(
        "python -m poly_epo_jax.study studies/polynomial.py",
        elsewhere="60 runs; see the other studies",
    ),
    Rule("python -m poly_epo_jax.study studies/polynomial.py --report", SMALL, says="report/report.html"),
    Rule("python -m poly_epo_jax.study studies/skewed.py", elsewhere="tests/study/test_study_runs.py, another study"),
    Rule("python docs/images/draw_countdown.py", elsewhere="reads the 60 runs of the study of Countdown"),
    Rule("python docs/images/draw_judge_errors.py", elsewhere="reads the 35 runs of the study of judge errors"),
    Rule(
        "third_party/sglang/env-gpu/bin/python -m sglang_router",
        elsewhere="tests/rollouts/test_sglang.py starts the SGLang router",
    ),
    Rule("python examples/minimal.py", "--num_steps=1", says="step 1: reward"),
    Rule("python fuzz", elsewhere="tests/fuzz/test_fuzz.py, with a few attempts each"),
    Rule("python3 -m venv .venv", elsewhere="launch/setup_env.sh creates .venv"),
    Rule("python benchmarks/advantages.py", says="closed form"),
    Rule("python benchmarks/compiled_machines.py", elsewhere="tests/benchmarks/test_compiled_machines.py"),
    Rule(
        "python benchmarks/correlated.py", elsewhere="tests/benchmarks/test_correlated_estimators.py, with one prompt"
    ),
    Rule("python benchmarks/decode_peers.py", elsewhere=PEERS),
    Rule("python benchmarks/estimators.py", elsewhere="tests/benchmarks/test_timings.py, with small inputs"),
    Rule("python benchmarks/intervals.py", elsewhere="tests/benchmarks/test_intervals.py, with fewer cases"),
    Rule("python benchmarks/memory_grid.py", elsewhere="tests/benchmarks/test_memory_grid.py, with fewer points"),
    Rule("python benchmarks/grading.py", elsewhere="tests/tasks/test_answer_pairs.py grades the same pairs"),
    Rule("python benchmarks/planted_strategies.py", says="responses: runs/planted/responses.jsonl"),
    Rule("python benchmarks/theory", elsewhere="tests/benchmarks/test_theory.py, with fewer steps; takes minutes"),
    Rule("python benchmarks/step_peers.py", elsewhere=PEERS),
    Rule("python benchmarks/update_peers.py", elsewhere=PEERS),
    Rule("python benchmarks/weight_sync.py", elsewhere="tests/benchmarks/test_timings.py, with few weights"),
    Rule("kubectl apply", elsewhere="tests/launch/test_jobset.py, without a cluster"),
    Rule("sbatch", says="of launch/slurm.sbatch"),
    Rule("source .venv/bin/activate"),
    Rule("source launch/setup_env.sh"),
)

# Stand-ins for sbatch, which is not installed, and for installers.
PROGRAMS = {
    "sbatch": 'while [ "${1#--}" != "$1" ]; do shift; done; bash -n "$1" && echo "Submitted a job of $*"',
    "pip": 'exec python -m pip "$@"',  # the pip module of the environment instead of a script in .venv/bin
    # uv would ignore the packages of the environment that runs this test.
    "uv": 'python=$4; shift 4; [ "$1" != --compile-bytecode ] || shift; exec "$python" -m pip install "$@"',
}
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "PIP_NO_BUILD_ISOLATION": "0",  # pip interprets 0 as disabling build isolation
    "PIP_NO_DEPS": "1",
    "PIP_NO_INDEX": "1",
}


def commands_in(text: str) -> Iterator[str]:
    """Yields all complete commands in order, from bash fences, indented blocks and inline code."""
    for code in CODE.finditer(re.sub(r"\\\n\s*", "", text)):
        if code["inline"]:
            words = " ".join(code["inline"].split())
            lines = [words] if INLINE.match(words) else []
        elif code["indented"]:
            lines = [code["indented"]]
        else:
            lines = code["fence"].splitlines() if code["language"] == "bash" else []
        for line in lines:
            command = re.sub(r"(^|\s+)#.*", "", line).strip()
            if command and "..." not in command:
                yield command


def rule_of(command: str) -> Rule | None:
    fitting = [rule for rule in RULES if command.startswith(rule.starts)]
    return max(fitting, key=lambda rule: len(rule.starts), default=None)


def from_documents() -> dict[str, str]:
    """Maps each command to the first document that contains it."""
    found: dict[str, str] = {}
    for document in DOCUMENTS:
        for command in commands_in(document.read_text()):
            found.setdefault(command, document.name)
    return found


def program_of(command: str) -> str:
    """Returns the command of the package or, for others, the first words up to a slash: `python benchmarks`."""
    package = re.search(r"(?:python -m poly_epo_jax\.|poly-epo )(\w+)", command)
    return package[1] if package else " ".join(command.split()[:2]).partition("/")[0]


COMMANDS = from_documents()
HERE = [command for command in COMMANDS if not ((rule := rule_of(command)) and rule.elsewhere)]
FIRST = {program_of(command): command for command in reversed(HERE) if program_of(command) != "doctor"}
"""The first command of each program except the doctor, whose checks have default tests in tests/doctor."""
LEARNED_FIRST = {"README.md", *(path.name for path in (ROOT / "docs" / "tutorials").glob("*.md"))}
"""Documents whose commands are all default tests. Of the other documents, the first command of each program is."""


def is_slow(command: str) -> bool:
    return COMMANDS[command] not in LEARNED_FIRST and command not in FIRST.values()


def module_of(command: str) -> str | None:
    """Returns the module of a command of the package that requires no shell."""
    match = re.match(r"(?:python -m poly_epo_jax\.|poly-epo )(\w+) [^$&|<>]*$", command)
    return match and cli.COMMANDS.get(match[1], (f"poly_epo_jax.{match[1]}",))[0]


def parameter_of(command: str) -> Any:
    marks = [pytest.mark.documented, pytest.mark.slow] if is_slow(command) else [pytest.mark.documented]
    return pytest.param(command, id=f"{COMMANDS[command]}: {command}", marks=marks)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies the tracked files."""
    copy = tmp_path_factory.mktemp("copy")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in listed.stdout.split("\0"):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def user(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[int, str]]:
    """Returns a function that runs a command in the copy, and returns its exit code and output."""
    programs = tmp_path_factory.mktemp("programs")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", copy / ".venv"], check=True)
    (packages,) = (copy / ".venv" / "lib").glob("python*/site-packages")
    (packages / "environment.pth").write_text("\n".join(site.getsitepackages()))
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (copy / ".venv" / "bin" / "pip").symlink_to(programs / "pip")
    # The variables of conftest.py and the packages that only tests install are removed. XLA_FLAGS for fast compilation
    # are added below, except for benchmarks, whose programs are compiled once and executed often.
    test_variables = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in test_variables}
    environment |= VARIABLES | user_variables("setuptools") | {"PATH": f"{programs}:{os.environ['PATH']}"}

    def run_command(command: str) -> tuple[int, str]:
        # `timeout` also terminates the child processes of the shell.
        shell = ["timeout", "600", "bash", "-c", f"source .venv/bin/activate && {command}"]
        flags = {} if command.startswith("python benchmarks/") else {"XLA_FLAGS": quick_compiles.FLAGS}
        ended = subprocess.run(
            shell, cwd=copy, env=environment | flags, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        return ended.returncode, ended.stdout

    return run_command


@pytest.fixture(scope="module")
def fork(copy: Path) -> Iterator[Callable[[str], tuple[int, str]]]:
    """Returns a function that runs a command of the package in the copy, without the time for its imports."""
    server = ForkServer(VARIABLES | {"PYTHONPATH": str(copy)})

    def run_command(command: str) -> tuple[int, str]:
        module, words = module_of(command), shlex.split(command)
        assert module
        ended = server.run(module, words[3 if words[0] == "python" else 2 :], copy)
        return ended.returncode, ended.stdout + ended.stderr

    yield run_command
    server.close()


def test_each_command_has_a_rule_and_each_rule_a_command():
    without = [f"{document}: {command}" for command, document in COMMANDS.items() if rule_of(command) is None]
    assert not without, "add rules for these commands to RULES"
    unused = [rule.starts for rule in RULES if rule not in map(rule_of, COMMANDS)]
    assert not unused, "no document contains a matching command; remove these rules"


@pytest.mark.parametrize("command", map(parameter_of, HERE))
def test_the_command_runs_as_documented(command: str, request: pytest.FixtureRequest):
    rule = rule_of(command)
    assert rule, "no rule in RULES"
    run_command = request.getfixturevalue("fork" if is_slow(command) and module_of(command) else "user")
    code, output = run_command(f"{command} {rule.flags}")
    assert "Traceback" not in output and "does not provide the extra" not in output, output[-3000:]
    if rule.error:
        last = output.strip().splitlines()[-1]
        assert code == 1 and last.startswith("Error: ") and rule.error in last, output[-3000:]
    else:
        assert code == 0 and rule.says in output, output[-3000:]


def test_shown_plans_are_those_of_the_commands():
    printed = [rule.says for rule in RULES if " GB of " in rule.says]
    documents = [document for document in DOCUMENTS if document.name != "own_problems.md"]  # see OWN
    joined = "\n".join(document.read_text() for document in documents).replace("\n# ", " ")
    shown = re.findall(r"Plan: \d.*", joined)
    assert shown and not [plan for plan in shown if not any(says in plan for says in printed)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_linked_files_exist(document: Path):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_files_named_in_the_architecture_exist():
    text = (ROOT / "docs" / "explanation" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/.]+\.(?:py|md))`", text))
    assert len(named) > 25
    assert [name for name in named if not ((ROOT / name).exists() or (ROOT / "poly_epo_jax" / name).exists())] == []
    top = {path.name for path in (ROOT / "poly_epo_jax").glob("*.py")} - {"__init__.py"}
    assert top == top & set(re.findall(r"\w+\.py", text)), "docs/explanation/architecture.md omits a root file"
