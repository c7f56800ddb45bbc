"""The one engine that executes any plan; its backends stand side by side and never import each other."""

from coterie.engine.api import Attended, grouped_attention

__all__ = ["Attended", "grouped_attention"]
