"""Coterie: clustered attention for PyTorch.

import coterie
out = coterie.attention(q, k, v, coterie.Smyrf(rounds=4, cluster_size=64))
"""

from coterie import nn
from coterie._version import __version__
from coterie.backend import backends
from coterie.checking import Broken, Checked, check_mechanism
from coterie.engine import Attended, grouped_attention
from coterie.fitting import Fit, fit, trade_off
from coterie.functional import attention, attention_varlen
from coterie.mechanisms import (
    AtLeast,
    Clustered,
    Fixed,
    Full,
    ImprovedClustered,
    Local,
    Longformer,
    Mechanism,
    NearFar,
    Reformer,
    Routing,
    Smyrf,
    Strided,
    Tokens,
    TopK,
    as_mechanism,
    list_mechanisms,
    register,
)
from coterie.observe import Seen, observing
from coterie.plan import Means, Plan, Round
from coterie.rounds_schedule import RoundsSchedule
from coterie.sdpa import Replaced, replacing

__all__ = [
    "AtLeast",
    "Attended",
    "Broken",
    "Checked",
    "Clustered",
    "Fit",
    "Fixed",
    "Full",
    "ImprovedClustered",
    "Local",
    "Longformer",
    "Means",
    "Mechanism",
    "NearFar",
    "Plan",
    "Reformer",
    "Replaced",
    "Round",
    "RoundsSchedule",
    "Routing",
    "Seen",
    "Smyrf",
    "Strided",
    "Tokens",
    "TopK",
    "__version__",
    "as_mechanism",
    "attention",
    "attention_varlen",
    "backends",
    "check_mechanism",
    "fit",
    "grouped_attention",
    "list_mechanisms",
    "nn",
    "observing",
    "register",
    "replacing",
    "trade_off",
]
