"""Runs the steps of step_case.py with TRL's GRPOTrainer. Child process of step_peers.py."""

import tempfile
import time
from typing import Any

import step_case
import torch  # pyright: ignore[reportMissingImports]
from datasets import Dataset  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]


class Clock(TrainerCallback):
    """Measures the seconds of each step, including sampling."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Starts the clock."""
        self._start = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Records the duration of the step."""
        self.seconds.append(time.perf_counter() - self._start)


def main() -> None:
    """Measures the steps of a training run."""
    folder, words = step_case.arguments()
    num_steps, batch = step_case.WARM_UPS + step_case.STEPS, step_case.PROMPTS * step_case.GENERATIONS
    prompts = [{"prompt": prompt} for prompt in words] * (1 + num_steps * step_case.PROMPTS // len(words))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    breaks = [token for text, token in tokenizer.get_vocab().items() if "Ċ" in text]  # "Ċ" represents a line break.
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *breaks]
    rewards: list[float] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        earned = [float(text.strip().lower() in words[p]) for p, text in zip(prompts, completions, strict=True)]
        rewards.append(sum(earned) / len(earned))
        return earned

    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        arguments = GRPOConfig(
            output_dir=output,
            max_steps=num_steps,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=1,
            num_generations=step_case.GENERATIONS,
            max_completion_length=step_case.MAX_TOKENS,
            learning_rate=step_case.LEARNING_RATE,
            lr_scheduler_type="constant",
            max_grad_norm=step_case.MAX_GRAD_NORM,
            epsilon=step_case.CLIP_LOW,
            epsilon_high=step_case.CLIP_HIGH,
            beta=0.0,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = Dataset.from_list(prompts)
        GRPOTrainer(model, reward, arguments, data, processing_class=tokenizer, callbacks=[clock]).train()
    step_case.report(clock.seconds, rewards, "transformers' generate, padded to the longest, float32")


if __name__ == "__main__":
    main()
