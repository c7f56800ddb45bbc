"""The machine that a figure was measured on."""

from __future__ import annotations

import platform
from pathlib import Path


def cpu(info: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's name; where the system tells them, with its family and model, since a virtual machine's name may not
    say which generation it is.

    Example:
        >>> from coterie.machine import cpu
        >>> bool(cpu())
        True
    """
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    told: dict[str, str] = {}
    for key, _, value in (line.partition(":") for line in lines):
        told.setdefault(key.strip(), value.strip())  # of the first core
    name = told.get("model name") or platform.processor() or platform.machine()
    if "cpu family" not in told or "model" not in told:
        return name
    return f"{name} (family {told['cpu family']}, model {told['model']})"
