"""Stand-ins for all of vLLM that a builder's source imports and its decode path does not need."""

from __future__ import annotations

import abc
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType


class _StubClass(abc.ABCMeta):
    """The class of all stand-ins: it can be subclassed, subscripted, called, decorated with, asked for more names."""

    def __getattr__(cls, name):
        if name.startswith("__") or name.startswith("_abc_"):
            raise AttributeError(name)
        return stub(f"{cls.__name__}.{name}")

    def register(cls, *args, **kwargs):  # ABCMeta's own would come first
        return stub("register")()

    def __getitem__(cls, key):
        return cls

    def __iter__(cls):
        return iter(())

    def __len__(cls):
        return 0

    def __bool__(cls):
        return False

    def __lt__(cls, other):
        return False

    __le__ = __gt__ = __ge__ = __lt__


class _Stub(metaclass=_StubClass):
    """An instance is as accommodating as its class, and false."""

    def __new__(cls, *args, **kwargs):
        # Used as a decorator it hands back what it decorates.
        if cls.__dict__.get("_stub") and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return super().__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(f"{type(self).__name__}.{name}")

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) else type(self)()

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


def stub(name: str):
    """A stand-in under `name`; every attribute, item and call of it is a stand-in again."""
    return _StubClass(name, (_Stub,), {"_stub": True})


class StubModule(ModuleType):
    """A module in which every name exists: those of `names` as given, the others as stand-ins."""

    def __init__(self, name, names=()):
        super().__init__(name)
        self.__path__ = []
        vars(self).update(names)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return stub(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module below "vllm": its source for those in `real`, else a stub module. `absent` are stubbed too."""

    def __init__(self, root, real, names, absent):
        self.root, self.real, self.names, self.absent = root, real, names, absent

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] not in self.absent:
            return None
        if fullname in self.real:
            source = self.root / (fullname.replace(".", "/") + ".py")
            return importlib.util.spec_from_file_location(fullname, source)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec):
        return StubModule(spec.name, self.names.get(spec.name, {}))

    def exec_module(self, module):
        pass


# Imported by vLLM's sources beside torch and numpy; their names are not used on the paths that run here.
BESIDE = ("einops", "tqdm")


@contextmanager
def stubbed(root: Path, real, names):
    """Within this context `import vllm...` gives the release below `root`: modules in `real` from source, others stubs.

    `names` maps a stub module to the names that must be more than stand-ins. `sys.modules` is as before afterwards.
    """
    absent = {"vllm", *(name for name in BESIDE if importlib.util.find_spec(name) is None)}
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in absent}
    finder = _Finder(Path(root), frozenset(real), names, absent)
    for name in before:
        del sys.modules[name]
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in absent]:
            del sys.modules[name]
        sys.modules.update(before)
