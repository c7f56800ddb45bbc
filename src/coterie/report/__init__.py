"""One HTML file that shows what `fit` chose, why, and how well it holds; or several fits side by side."""

from coterie.analysis.head_errors import head_errors
from coterie.report.comparison import write_several
from coterie.report.page import write
from coterie.report.pictures import Pictures

__all__ = ["Pictures", "head_errors", "write", "write_several"]
