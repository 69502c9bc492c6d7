"""Lazy import of torch's compiler, for the processes that tests start.

An optimizer imports the compiler, which takes more than a second of CPU time, for two functions that do nothing where
nothing is compiled.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

NAME = "torch._dynamo"


class Later(types.ModuleType):
    """In the compiler's place until anything else of it is wanted."""

    @staticmethod
    def disable(function, recursive=True, wrapping=True):
        return function

    @staticmethod
    def graph_break():
        pass

    def __getattr__(self, name):
        if name.startswith("__") and not (name == "__path__" and vars(self).get("is_there")):
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            sys.meta_path.remove(FINDER)
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == NAME else None

    def create_module(self, spec):
        return Later(NAME)

    def exec_module(self, module):
        module.is_there = True


FINDER = Finder()
sys.meta_path.insert(0, FINDER)
