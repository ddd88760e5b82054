"""The content that a server shows after a weight update, and its comparison with the pushed weights."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from poly_epo_jax.rollouts.servers.dialect import ServerCompletion
from poly_epo_jax.rollouts.servers.weight_reference import PushedWeights

MIN_CHANGED = 1e-3
"""Minimum fraction of changed entries at which the log-probabilities of the probe must change. Fewer changes may vanish
by rounding."""
EMPTY_SHA256 = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
"""SHA-256 of zero bytes, which servers report for tensors that they store elsewhere."""
MIN_DIGITS = 16
"""Minimum length of a checksum that is compared. SGLang reports the first 16 digits of SHA-256."""


@dataclasses.dataclass(frozen=True, eq=False)
class Evidence:
    """The content that a server showed after a weight update.

    Attributes:
      answer: Completion of the probe, computed without the prefix cache.
      is_repeatable: Whether the server returns equal log-probabilities for equal requests. False if it may generate
        other responses at the same time.
      checksums: Checksums of tensors, without those of zero bytes. Empty if the server has none.
      is_quantized: Whether the server quantizes the pushed weights.
    """

    answer: ServerCompletion
    is_repeatable: bool
    checksums: Mapping[str, str]
    is_quantized: bool


@dataclasses.dataclass(frozen=True, eq=False)
class Verified:
    """The last successful verification of a server.

    Attributes:
      name: Name of the weights.
      pushed: Content of the push.
      evidence: Evidence of the server.
      exact: Tensors whose checksums have equaled those of the pushed bytes.
      kind: URL of the first server of its group, whose servers had equal answers in their first verification.
    """

    name: str
    pushed: PushedWeights
    evidence: Evidence
    exact: frozenset[str]
    kind: str


def is_same(one: ServerCompletion, other: ServerCompletion) -> bool:
    """Returns True if two answers have the same tokens and exactly the same log-probabilities."""
    return np.array_equal(one.token_ids, other.token_ids) and np.array_equal(one.logprobs, other.logprobs)


def valid_checksums(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Joins the checksums of all ranks of a server, keyed by tensor name.

    Checksums of zero bytes prove nothing. Tensors with such a checksum on any rank are omitted, as are tensors with a
    checksum that is too short.
    """
    joined: dict[str, list[str]] = {}
    for rank in ranks:
        for name, checksum in rank.items():
            joined.setdefault(name, []).append(checksum.lower())
    return {
        name: "+".join(checksums)
        for name, checksums in joined.items()
        if not any(len(one) < MIN_DIGITS or EMPTY_SHA256.startswith(one) for one in checksums)
    }


def exact_tensors(pushed: PushedWeights, checksums: Mapping[str, str]) -> frozenset[str]:
    """Returns the names of the tensors whose checksum is the SHA-256 of the pushed bytes, or its first digits."""
    return frozenset(name for name, digest in pushed.digests.items() if digest.startswith(checksums.get(name, "-")))


def bytes_flaw(pushed: PushedWeights, evidence: Evidence, before: Verified | None) -> str | None:
    """Compares the checksums of a server with the pushed bytes.

    Args:
      pushed: Content of the push.
      evidence: Evidence of the server.
      before: Last successful verification of the server. If None, only equal checksums prove the update.

    Returns:
      "" if the checksums prove the update, a flaw, or None if they prove nothing.
    """
    exact, checksums = exact_tensors(pushed, evidence.checksums), evidence.checksums
    if before is None:
        return "" if exact else None
    wrong, proven = (before.exact & checksums.keys()) - exact, exact
    for name in (before.pushed.digests.keys() & before.evidence.checksums.keys() & checksums.keys()) - exact:
        was_pushed = before.pushed.digests[name] != pushed.digests[name]
        if was_pushed != (before.evidence.checksums[name] != checksums[name]):
            wrong |= {name}
        elif was_pushed:
            proven |= {name}
    if wrong:
        return (
            f"{len(wrong)} of {len(pushed.digests)} tensors have other bytes than the trainer's, such as {min(wrong)}"
        )
    return "" if proven else None


def change_flaw(pushed: PushedWeights, evidence: Evidence, before: Verified | None) -> str | None:
    """Compares the log-probabilities of a server with those before the update.

    Args:
      pushed: Content of the push.
      evidence: Evidence of the server.
      before: Last successful verification of the server, if any.

    Returns:
      "" if the log-probabilities prove the update, a flaw, or None if they prove nothing: without an earlier
      verification, if equal requests have different answers, or if too few pushed bytes have changed.
    """
    if before is None or not (evidence.is_repeatable and before.evidence.is_repeatable):
        return None
    has_changed = not is_same(before.evidence.answer, evidence.answer)
    if before.pushed is pushed:  # The server has restarted, or failed during a batch.
        return "its log-probabilities differ from its earlier ones with the same weights" if has_changed else ""
    if not has_changed and (before.pushed.entries != pushed.entries).any(axis=1).mean() >= MIN_CHANGED:
        return f"its log-probabilities are those of weights {before.name}"
    return "" if has_changed else None


def trainer_flaw(difference: float, tolerance: float) -> str:
    """Returns a flaw if the mean difference from the trainer's log-probabilities, in nats, exceeds the tolerance."""
    if difference <= tolerance:
        return ""
    return (
        f"its log-probabilities differ from the trainer's by {difference:.2g} nats on average, but the tolerance is "
        f"{tolerance:g}; check that it serves model.path and loads all weights"
    )


def describe_checks(verified: Verified, tolerance: float) -> str:
    """Describes the active checks of a server, for the message at the first update.

    Args:
      verified: Verification of the server.
      tolerance: Tolerance of the log-probabilities, in nats.
    """
    evidence = verified.evidence
    compared = verified.pushed.digests.keys() & evidence.checksums.keys()
    checks = (
        [f"checksums of {len(compared)} tensors ({len(verified.exact)} equal the pushed bytes)"] if compared else []
    )
    if evidence.is_repeatable:
        checks.append("changes of its log-probabilities")
    if not evidence.is_quantized:
        checks.append(f"the trainer's log-probabilities (within {tolerance:g} nats)")
    if not evidence.is_repeatable:
        checks.append("not by changes of its log-probabilities, which differ between equal requests")
    return ", ".join(checks)
