"""The mechanisms: one file each, a frozen dataclass and its plan."""

from coterie.mechanisms.base import Mechanism, as_mechanism, list_mechanisms, register
from coterie.mechanisms.smyrf import Smyrf
from coterie.planning.tokens import Tokens

from coterie.mechanisms.clustered import Clustered  # isort: skip
from coterie.mechanisms.improved_clustered import ImprovedClustered  # isort: skip
from coterie.mechanisms.near_far import NearFar  # isort: skip
from coterie.mechanisms.reformer import Reformer  # isort: skip
from coterie.mechanisms.routing import Routing  # isort: skip
from coterie.mechanisms.local import Local  # isort: skip
from coterie.mechanisms.longformer import Longformer  # isort: skip
from coterie.mechanisms.topk import TopK  # isort: skip
from coterie.mechanisms.full import Full  # isort: skip
from coterie.mechanisms.strided import Strided  # isort: skip
from coterie.mechanisms.fixed import Fixed  # isort: skip
from coterie.mechanisms.at_least import AtLeast  # isort: skip

__all__ = [
    "AtLeast",
    "Clustered",
    "Fixed",
    "Full",
    "ImprovedClustered",
    "Local",
    "Longformer",
    "Mechanism",
    "NearFar",
    "Reformer",
    "Routing",
    "Smyrf",
    "Strided",
    "Tokens",
    "TopK",
    "as_mechanism",
    "list_mechanisms",
    "register",
]
