"""Stands in for SGLang's compiled kernels, which have no CPU build on the package index.

Every name and every submodule can be imported. Calling one raises NotImplementedError with its name: a model that needs
a kernel must fail, not compute something else.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

__version__ = "0.4.10"  # SGLang compares it with the least that it wants


class MissingKernel:
    """A kernel that is not there; so are its attributes."""

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"{self.__name__} has no CPU build: this model or flag needs a GPU")


class _Module(ModuleType):
    def __getattr__(self, name: str) -> MissingKernel:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingKernel(f"{self.__name__}.{name}")


class _Submodules(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Submodules())
sys.modules[__name__].__class__ = _Module
