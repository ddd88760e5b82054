"""Lets SGLang run beside a CPU build of torch; python imports this by itself where its folder is on PYTHONPATH.

The torchvision on PyPI is linked against CUDA, so its operators do not load, and importing it fails for want of two of
them. They are declared here before it is imported; serving text calls neither.

SGLang spawns its scheduler and its detokenizer, as CUDA needs. Without CUDA they are forked, which spares both of them
the import of all that their parent has imported: two fifths of the time of a start, and half of its work.
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
        return None  # whatever the module, the finders after this one find it


sys.meta_path.insert(0, _DeclareOperators())

_set_start_method = multiprocessing.set_start_method


def _fork_instead_of_spawn(method, force=False):
    _set_start_method("fork" if method == "spawn" else method, force)


multiprocessing.set_start_method = _fork_instead_of_spawn
