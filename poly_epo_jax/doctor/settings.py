"""Everything else that would make a run refuse to start."""

from poly_epo_jax.doctor.finding import Seen, Subject
from poly_epo_jax.prepare import prepare


def check_settings(subject: Subject) -> Seen:
    """Checks folders, data, lengths and the memory plan."""
    _, task, _ = prepare(subject.config)
    train, held_out = len(task.train_problems), len(task.held_out_problems)
    figures = {"training problems": train, "held-out problems": held_out}
    return f"folders, lengths and memory fit; {train:,} training and {held_out:,} held-out problems", figures
