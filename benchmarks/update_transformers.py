"""Runs the update of update_case.py with transformers and torch. Child process of update_peers.py.

Sequences are padded on the right to the longest sequence of the batch. Causal attention then requires no padding mask,
so that SDPA uses its fast path. The output head only processes response tokens.
"""

import os

import torch  # pyright: ignore[reportMissingImports]
import update_case
from transformers import AutoModelForCausalLM


def main() -> None:
    """Measures one case."""
    folder, case = update_case.model_and_case()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(
        model.parameters(),
        update_case.LEARNING_RATE,
        (update_case.B1, update_case.B2),
        update_case.EPS,
        update_case.WEIGHT_DECAY,
        fused=True,
    )

    batch = update_case.random_batch(case)
    padded = {name: torch.from_numpy(x) for name, x in batch.padded(max(map(len, batch.responses))).items()}
    tokens = torch.cat([torch.from_numpy(batch.prompts), padded["responses"]], dim=1).long()
    is_response = padded["mask"]
    predicts = torch.zeros(tokens.shape, dtype=torch.bool)
    predicts[:, update_case.PROMPT - 1 : -1] = is_response
    targets, old_logprobs = tokens[:, update_case.PROMPT :][is_response], padded["old_logprobs"][is_response]
    advantages = torch.from_numpy(batch.advantages)[:, None].expand(is_response.shape)[is_response]

    def step() -> dict[str, torch.Tensor]:
        hidden = model.model(tokens, use_cache=False).last_hidden_state
        log_p = model.lm_head(hidden[predicts]).log_softmax(-1)
        logprobs = log_p.gather(1, targets[:, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1).mean()
        ratio = (logprobs - old_logprobs).exp()
        clipped = ratio.clamp(1 - update_case.CLIP_LOW, 1 + update_case.CLIP_HIGH)
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean() - update_case.ENTROPY_COEF * entropy
        loss.backward()
        gradient_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), update_case.MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return {"loss": loss.detach(), "gradient_norm": gradient_norm, "entropy": entropy.detach()}

    update_case.report(case, batch, step, tokens.numel(), "padded to the longest, head on responses, SDPA")


if __name__ == "__main__":
    main()
