"""Python runs this first in a process that has `user_packages.user_variables`: it hides what only tests install."""

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

HIDDEN = frozenset(os.environ["POLY_EPO_HIDDEN_MODULES"].split())


class UsersFinder(importlib.machinery.PathFinder):
    """Finds modules as Python does, apart from those."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = UsersFinder
