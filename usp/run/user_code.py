"""Objects from a file of the user's."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

from .failures import nearest


def load_from_file(name: str, what: str) -> Any:
    """Return the object that PATH.py:NAME names; `what` it is, for messages.

    Raises:
        ValueError: for another name, a file that cannot be imported, or a missing object.
    """
    path, _, object_name = name.rpartition(":")
    file = Path(path).expanduser()
    if file.suffix != ".py" or not file.is_file():
        raise ValueError(f"{name} must be PATH.py:NAME with an existing file")
    spec = importlib.util.spec_from_file_location(f"{file.resolve()}", file)  # a name that no import can shadow
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up annotations there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[spec.name]
        raise ValueError(f"{name}: {file} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, object_name):
        raise ValueError(f"{name}: {file} has no {what} {object_name}{nearest(object_name, vars(module))}")
    return getattr(module, object_name)
