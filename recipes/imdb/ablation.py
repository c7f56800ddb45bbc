"""The mechanisms of the ablation: other ways to choose about as many keys."""

from __future__ import annotations

import coterie

# About 245 keys a query in reviews of all lengths, counted as often as they are met; `costs` counts them in every run.
# Reformer's chunks also meet the chunk before, so they are half as large as SMYRF's clusters.
ABLATION = {
    "SMYRF": "smyrf:rounds=8,cluster_size=32",
    "E2LSH": "smyrf:rounds=8,cluster_size=32,transform=none,hash=e2lsh",
    "Reformer": "reformer:rounds=8,chunk_size=16",
    "near–far": "near-far:near=256",
    "improved clustered": "improved-clustered:clusters=100,topk=144",
}


def names(mechanisms: list[str]) -> dict[str, str]:
    """What readers know these strings by.

    >>> names(["dense", "reformer:rounds=8,chunk_size=16", "local:window=64"])
    {'dense': 'dense', 'reformer:rounds=8,chunk_size=16': 'Reformer', 'local:window=64': 'local'}
    """
    known = {str(coterie.as_mechanism(spec)): name for name, spec in ABLATION.items()}
    return {spec: known.get(spec, spec.partition(":")[0]) for spec in mechanisms}
