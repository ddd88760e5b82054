"""Every configuration key with its default and its meaning; a configuration file states only what differs.

The defaults train polynomial solving well on a laptop. A file of your own, in any folder, builds on get_config.

Override any of them on the command line: --config.optimizer.learning_rate=1e-4

Words after a file's name choose a method, a mesh, or both: --config=configs/polaris.py:grpo,h200x8
"""

from ml_collections import ConfigDict

from poly_epo_jax.parallel.presets import MESHES

METHODS = {
    "poly_epo": {"advantages": "marginal_set", "length_normalization": "max"},
    "grpo": {"advantages": "grpo", "length_normalization": "own"},
    "grpo_div": {"advantages": "grpo_div", "length_normalization": "own"},
}


def parse_words(words: str) -> tuple[str, str]:
    """(one of METHODS, one of MESHES or "") from `words`, which names at most one of each, with a comma between."""
    methods, meshes = [], []
    for word in filter(None, words.split(",")):
        if word not in METHODS and word not in MESHES:
            raise ValueError(
                f"Unknown word ':{word}' after the config file; choose a method ({', '.join(METHODS)}), a mesh "
                f"({', '.join(MESHES)}), or both, with a comma between."
            )
        (methods if word in METHODS else meshes).append(word)
    if len(methods) > 1 or len(meshes) > 1:
        raise ValueError(f"':{words}' after the config file names two methods or two meshes; name one of each at most.")
    return [*methods, "poly_epo"][0], [*meshes, ""][0]


def get_config(words: str = "poly_epo") -> ConfigDict:
    """The defaults for one of METHODS, the paper's three (appendix "Implementation Details"), and one of MESHES."""
    method, mesh = parse_words(words)
    config = ConfigDict()

    config.workdir = "runs/default"  # the run folder; a checkpoint found in it is resumed
    config.compilation_cache = "runs/compiled"  # compiled programs are kept here and reused by later runs
    config.seed = 0  # of the data order and of every sampled token

    config.model = ConfigDict()
    config.model.path = ""  # a Hugging Face folder, or a name on the hub; empty: the policy that `base` describes
    config.model.stop_tokens = ()  # that end a response, besides the end-of-sequence tokens which the folder names
    config.model.dtype = "float32"  # of activations and matrix products: bfloat16 or float32
    config.model.param_dtype = "float32"  # of weights
    config.model.remat = "none"  # what the backward pass recomputes: none, dots, attention or full
    config.model.scan_unroll = 2  # layers per step of the layer scan
    config.model.attention = "auto"  # blockwise (anywhere), tokamax (GPU), splash (TPU); auto picks the backend's own

    config.base = ConfigDict()  # a tiny policy fitted to the task's synthetic demonstrations, where model.path is empty
    config.base.cache_dir = "runs/base"  # kept here, and reused by every run with the same task and recipe
    config.base.seed = 0  # of its first weights and of the demonstrations
    config.base.hidden_size = 64  # its shape: width of the residual stream,
    config.base.mlp_size = 192  # inner width of the MLP,
    config.base.num_layers = 2  # transformer layers,
    config.base.num_heads = 4  # query heads,
    config.base.num_kv_heads = 2  # key-value heads, each shared by several query heads,
    config.base.head_dim = 16  # and width of a head
    config.base.batch_size = 128  # demonstrations per step
    config.base.clean_steps = 1200  # first on right demonstrations,
    config.base.clean_learning_rate = 3e-3  # peak, warmed up to and decayed from within those steps
    config.base.noisy_steps = 120  # then on demonstrations with deliberate mistakes, which RL can later correct
    config.base.noisy_learning_rate = 1e-3  # likewise
    config.base.error_rate = 1.0  # scale of those mistakes; each task says what 1 means
    config.base.skew = 0.0  # 0: all strategies equally likely; larger: concentrated on a few

    config.task = ConfigDict()
    config.task.name = "polynomial"  # a key of poly_epo_jax.tasks.TASKS
    config.task.options = ConfigDict()  # keyword arguments of that task, --config.task.options="{'seed': 1}"

    config.judge = ConfigDict()
    config.judge.name = "exact"  # a key of poly_epo_jax.judges.JUDGES; all else but the last key is for "llm"
    config.judge.url = ""  # of an OpenAI-compatible server, such as http://127.0.0.1:30001
    config.judge.model = ""  # by the name it has there; empty: the first that the server lists
    config.judge.api_key_env = ""  # the environment variable that holds the key of a hosted model
    config.judge.temperature = 0.7  # of the judge's own sampling
    config.judge.max_tokens = 2048  # longest reply
    config.judge.prompt_file = ""  # your own rubric; empty: poly_epo_jax/judges/rubric.md
    config.judge.max_response_chars = 20_000  # of a longer response the judge sees head and tail
    config.judge.attempts = 3  # requests per prompt, in all, before a malformed reply counts as a failure
    config.judge.timeout_seconds = 300.0  # per request
    config.judge.wait_seconds = 600.0  # for a server that does not answer
    config.judge.max_concurrent = 64  # requests at once
    config.judge.max_failed_share = 0.25  # of a batch's prompts; the run stops where the judge fails on more

    config.rollouts = ConfigDict()
    config.rollouts.name = "embedded"  # a key of poly_epo_jax.rollouts.ROLLOUTS: embedded, jetstream or sglang
    config.rollouts.max_concurrent = 512  # generations at once, with sglang for each URL; all else is for "sglang"
    config.rollouts.urls = ""  # of servers or routers, such as http://127.0.0.1:30000; commas between several
    config.rollouts.shared = False  # on several hosts: whether all use the same servers; else each has its own at urls
    config.rollouts.weight_sync = "disk"  # how: disk (a folder that the servers read) or tensor (CUDA IPC on one host)
    config.rollouts.weights_dir = "/dev/shm/poly_epo_jax"  # that folder; one that all hosts of servers see
    config.rollouts.weights_dtype = "bfloat16"  # what the servers compute with
    config.rollouts.tensor_parallel = 1  # of each server, for tensor
    config.rollouts.timeout_seconds = 1800.0  # for the generations of one prompt, and for a weight update
    config.rollouts.wait_seconds = 900.0  # for a server that does not answer, at the start or later

    config.sampling = ConfigDict()
    config.sampling.max_tokens = 14  # longest response, the paper's T_max
    config.sampling.temperature = 1.0  # of sampling, and of the log-probabilities that are trained
    config.sampling.top_p = 1.0  # sample from the likeliest tokens that reach this probability; 1: off
    config.sampling.top_k = 0  # sample from this many likeliest tokens; 0: off

    config.algo = ConfigDict()
    config.algo.advantages = METHODS[method]["advantages"]  # marginal_set, grpo or grpo_div
    config.algo.objective = "polychromic"  # of marginal_set: a key of poly_epo_jax.set_rl.OBJECTIVES
    config.algo.set_size = 4  # n, generations per set
    config.algo.num_sets = 0  # K sets drawn per prompt; 0: all C(N, n)
    config.algo.div_coef = 0.5  # lambda of grpo_div
    config.algo.loss = "ppo_clip"  # a key of poly_epo_jax.set_rl.LOSSES
    config.algo.clip_low = 0.20  # probability ratios are clipped below 1 - clip_low
    config.algo.clip_high = 0.28  # and above 1 + clip_high
    config.algo.length_normalization = METHODS[method]["length_normalization"]  # T_i: own length, or max
    config.algo.old_logprobs = "trainer"  # whose log-probabilities ratios are to: trainer or sampler
    config.algo.importance_cap = 2.0  # largest ratio to the sampler's (truncated importance sampling)
    config.algo.kl_coef = 0.0  # weight of KL(policy || initial policy)
    config.algo.entropy_coef = 0.0  # weight of the entropy bonus

    config.train = ConfigDict()
    config.train.num_steps = 150  # each generates one batch and trains on it
    config.train.prompts_per_batch = 64  # generated per step
    config.train.prompts_per_minibatch = 32  # one optimizer update each
    config.train.num_generations = 8  # N, per prompt
    config.train.max_prompt_tokens = 10  # longest prompt; problems with a longer one are left out
    config.train.staleness = 0  # 1: the next batch is generated while this one is trained, one step off-policy
    config.train.row_tokens = 40  # sequences are packed into rows of this many tokens
    config.train.rows_per_device = 72  # rows whose gradient is taken at once, on each group of mesh.tensor devices

    config.optimizer = ConfigDict()  # AdamW
    config.optimizer.learning_rate = 5e-4  # peak
    config.optimizer.warmup_updates = 0  # updates of linear rise before it
    config.optimizer.schedule = "linear"  # after the warm-up: constant, linear or cosine
    config.optimizer.final_fraction = 0.02  # of the learning rate, where linear and cosine end
    config.optimizer.b1 = 0.9  # decay of the gradient's running mean
    config.optimizer.b2 = 0.999  # decay of the squared gradient's
    config.optimizer.first_moment_dtype = "float32"  # bfloat16 halves it; the second moment would stall in less
    config.optimizer.eps = 1e-8  # added to the square root of the latter
    config.optimizer.weight_decay = 0.0  # decoupled, times the learning rate
    config.optimizer.max_grad_norm = 0.3  # longer gradients are scaled down to this norm

    config.mesh = ConfigDict()  # devices along each axis; one of them may be -1, for all that are left
    config.mesh.data = 1  # replicas of the weights
    config.mesh.fsdp = -1  # shards of each weight along its embedding axis
    config.mesh.tensor = 1  # shards of heads, MLP and vocabulary
    config.mesh.device = ""  # a key of poly_epo_jax.parallel.devices.DEVICES; empty: whatever is there
    config.mesh.devices = 0  # how many there are; 0: not said
    if mesh:
        config.mesh.update({key: value for key, value in MESHES[mesh].items() if key != "processes"})

    config.hosts = ConfigDict()  # several processes that train as one, with the same configuration but for the index
    config.hosts.coordinator = ""  # HOST:PORT of the first; auto: SLURM or the TPU pod knows; empty: a single process
    config.hosts.count = 1  # how many there are, where not auto
    config.hosts.index = 0  # which of them this is, likewise
    config.hosts.wait_seconds = 300  # for each other at the start

    config.checkpoint = ConfigDict()
    config.checkpoint.every = 50  # steps
    config.checkpoint.keep = 2  # the newest ones

    config.eval = ConfigDict()  # on held-out problems
    config.eval.every = 20  # steps; 0: never
    config.eval.num_problems = 40  # the first ones
    config.eval.num_generations = 64  # per problem

    config.log = ConfigDict()
    config.log.generations_every = 10  # steps between batches written to generations.jsonl
    config.log.wandb_project = ""  # empty: no Weights & Biases

    return config.lock()
