"""One HTML file that shows what `fit` chose, why, and how well it holds."""

from coterie.report.page import write
from coterie.report.pictures import Pictures, head_errors

__all__ = ["Pictures", "head_errors", "write"]
