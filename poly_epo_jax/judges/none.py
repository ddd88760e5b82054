"""No judge, for advantages that do not read clusters."""

from poly_epo_jax.types import Group


class NoJudge:
    """Does not cluster."""

    async def cluster(self, group: Group) -> None:
        return None
