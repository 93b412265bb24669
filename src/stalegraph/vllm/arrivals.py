"""Calls back when a module has been imported, so that a plugin can patch vLLM without importing any of it itself."""

from __future__ import annotations

import importlib.abc
import sys
from collections.abc import Callable
from types import ModuleType

_waiting: dict[str, list[Callable[[ModuleType], None]]] = {}


def on_arrival(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Run `callback(module)` once: now if module `name` is imported already, else right after its first import.

    vLLM imports its attention backends late, and differently from release to release and from process to process;
    importing them at plugin load would load CUDA libraries in processes that have no GPU.
    """
    module = sys.modules.get(name)
    # A module that is still being executed is in sys.modules too: its spec says so.
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        callback(module)
        return
    _waiting.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Wait no longer for module `name` on behalf of `callback`."""
    callbacks = _waiting.get(name, [])
    if callback in callbacks:
        callbacks.remove(callback)
    if not callbacks:
        _waiting.pop(name, None)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: it asks the finders behind it and has the loader call back when the module is complete."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is None:
                continue
            if hasattr(spec.loader, "exec_module"):
                self._hook(fullname, spec.loader)
            return spec
        return None

    @staticmethod
    def _hook(fullname, loader):
        execute = loader.exec_module

        def exec_module(module):
            execute(module)
            for callback in _waiting.pop(fullname, []):
                callback(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader without a __dict__: the module arrives unpatched
            pass


_finder = _Finder()
