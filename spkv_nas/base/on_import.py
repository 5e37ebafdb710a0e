"""What is to be done as soon as a library is imported, by whoever, so that it need not be imported for that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(module: str, action: Callable[[], None]) -> None:
    """Call ``action`` once: now if ``module`` has been imported, otherwise right after it is."""
    if module in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watch(module, action))


class _Watch(MetaPathFinder):
    """Finds nothing itself; lets the others find the module, and acts when it has been executed."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module, self.action = module, action
        self._is_asking = False  # the others, in this moment

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.module or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self.action()

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec
