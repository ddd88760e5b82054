"""Hides packages that only tests install. Python imports it in processes with `user_packages.user_variables`."""

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

HIDDEN = frozenset(os.environ["POLY_EPO_HIDDEN_MODULES"].split())


class UserFinder(importlib.machinery.PathFinder):
    """Finds modules like `PathFinder`, except the hidden ones."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = UserFinder
