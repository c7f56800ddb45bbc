"""`coterie.check_mechanism`: does a mechanism keep the rules?"""

from coterie.checking.check import check_mechanism
from coterie.checking.report import Broken, Checked
from coterie.checking.rules import RULES

__all__ = ["RULES", "Broken", "Checked", "check_mechanism"]
