"""Whether the devices are those that the run asks for, can be arranged as it asks, and compute correctly."""

import math

import jax
import jax.numpy as jnp

from poly_epo_jax.doctor.examine import Failed, Finding, Seen, Subject
from poly_epo_jax.memory_plan.tables import amount, setting_of
from poly_epo_jax.model.attention import fastest
from poly_epo_jax.model.attention.self_check import check_attention
from poly_epo_jax.parallel import hosts

SIZE = 512  # of the matrices that each device multiplies


def check_devices(subject: Subject) -> Seen:
    """Checks the mesh, and on each device a product of whole numbers, which is exact in every type."""
    mesh, dtype = subject.mesh, subject.config.model.dtype
    a = jnp.arange(SIZE)[:, None] % 4
    b = jnp.arange(SIZE)[None] % 3
    for device in subject.here.devices.flat:
        x, y = (jax.device_put(jnp.broadcast_to(m, (SIZE, SIZE)).astype(dtype), device) for m in (a, b))
        # Each sum is SIZE times a product below 8: small enough for float32, the type of the sums.
        found = jnp.matmul(x, y, preferred_element_type=jnp.float32)
        if not bool((found == (SIZE * a * b).astype(jnp.float32)).all()):
            raise Failed(f"{device} multiplies small whole numbers wrongly; take it out of use, and test its memory")
    kind = mesh.devices.flat[0].device_kind
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    _, memory_bytes = setting_of(subject.config)
    room = f", {amount(memory_bytes)} each for JAX" if memory_bytes else ""
    where = f" on {hosts.count()} hosts" if hosts.count() > 1 else ""
    return f"{mesh.size} x {kind}{where}{room}; mesh {axes}", {"devices": mesh.size, "kind": kind}


def check_kernel(subject: Subject) -> list[Finding]:
    """Compares the run's attention with its definition: values and gradients, on the run's mesh.

    Returns:
      One finding, whose figures are the error and the allowed error of each quantity, whether or not they pass.
    """
    with jax.set_mesh(subject.here):
        implementation = fastest(subject.shape.attention)
    found, figures = check_attention(implementation, subject.here, subject.shape), {}
    for name, (error, most) in found.errors.items():
        figures |= {f"error of {name}": error if math.isfinite(error) else str(error), f"allowed of {name}": most}
    if found.passed:
        return [Finding("kernel", "passed", str(found), figures)]
    seen = f"{found}; set --config.model.attention=blockwise, which is slower, and report the kernel"
    return [Finding("kernel", "failed", seen, figures)]
