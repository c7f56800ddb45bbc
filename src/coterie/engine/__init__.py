"""The one engine that executes any plan; its backends stand side by side and never import each other."""

from coterie.engine.api import Attended, backends, grouped_attention

__all__ = ["Attended", "backends", "grouped_attention"]
