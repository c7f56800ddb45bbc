"""See it and prove it: spectra of attention maps, who is grouped with whom, what a mechanism changes, and the theory.

`coterie.analysis.biclustering` is a package of its own; docs/theory.md goes with it.
"""

from coterie.analysis.agreement import (
    Agreement,
    Following,
    Segment,
    adjusted_rand,
    agreement,
    following,
    head_groups,
)
from coterie.analysis.compare import ABLATION, Comparison, compare, sized
from coterie.analysis.errors import AttentionErrors, Estimate, attention_errors
from coterie.analysis.figures.agreement import draw_agreement, draw_timeline
from coterie.analysis.figures.memberships import draw_grid, draw_locality, draw_meetings, draw_tokens, tokens_html
from coterie.analysis.figures.saving import save
from coterie.analysis.figures.spectra import draw_spectra
from coterie.analysis.images import Pixels, image_queries
from coterie.analysis.maps import HeadMap, head_maps
from coterie.analysis.memberships import Locality, groups_of, locality, meetings
from coterie.analysis.spectra import HeadSpectrum, Spectra, head_spectra, spectra

__all__ = [
    "ABLATION",
    "Agreement",
    "AttentionErrors",
    "Comparison",
    "Estimate",
    "Following",
    "HeadMap",
    "HeadSpectrum",
    "Locality",
    "Pixels",
    "Segment",
    "Spectra",
    "adjusted_rand",
    "agreement",
    "attention_errors",
    "compare",
    "draw_agreement",
    "draw_grid",
    "draw_locality",
    "draw_meetings",
    "draw_spectra",
    "draw_timeline",
    "draw_tokens",
    "following",
    "groups_of",
    "head_groups",
    "head_maps",
    "head_spectra",
    "image_queries",
    "locality",
    "meetings",
    "save",
    "sized",
    "spectra",
    "tokens_html",
]
