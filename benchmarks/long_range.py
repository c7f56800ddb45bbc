"""Near–far at long range beside SDPA, and beside another build of Coterie: milliseconds of a forward pass.

    python -m benchmarks.long_range
    python -m benchmarks.long_range --against ../older/.venv/bin/python    # another build, in the same run

Causal calls have 9 query heads on 3 key heads of 64, as SmolLM2 has; the others 8 heads of 64. Planning is included.
Everything takes turns; each figure is a median. With another interpreter the two run in processes of their own, which
take turns too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import coterie

# Mechanism, tokens, causal
CASES = [
    ("near-far:near=176", 8192, True),
    ("near-far:near=176", 16_384, True),
    ("near-far:near=64", 8192, False),
    ("near-far:near=64", 16_384, False),
]


def tensors(length: int, heads: int, key_heads: int, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v whose tokens are of one of 64 topics, so that attention is peaked as in a trained model."""
    generator = torch.Generator().manual_seed(0)
    topics = torch.randn(1, key_heads, 64, dim, generator=generator)
    which = torch.randint(64, (1, key_heads, length, 1), generator=generator).expand(-1, -1, -1, dim)
    topic = topics.gather(2, which)

    def noisy(rows: torch.Tensor) -> torch.Tensor:
        return 1.2 * rows + 0.8 * torch.randn(rows.shape, generator=generator)

    return noisy(topic.repeat_interleave(heads // key_heads, 1)), noisy(topic), noisy(topic)


def measure(repeats: int, *, dense: bool) -> dict[str, float]:
    """Milliseconds of each case, and of SDPA if asked for."""
    found: dict[str, float] = {}
    for spec, length, causal in CASES:
        q, k, v = tensors(length, *((9, 3) if causal else (8, 8)))
        mechanism = coterie.as_mechanism(spec)
        taken: dict[str, list[float]] = {"sdpa": [], "ours": []}
        for _ in range(repeats + 1):
            start = time.perf_counter()
            coterie.attention(q, k, v, mechanism, is_causal=causal, enable_gqa=causal)
            taken["ours"].append(time.perf_counter() - start)
            if dense:
                start = time.perf_counter()
                F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=causal)
                taken["sdpa"].append(time.perf_counter() - start)
        name = f"{spec}, {length:,}{', causal' * causal}"
        for which, times in taken.items():
            if times:
                found[f"{name} | {which}"] = 1000 * statistics.median(times[1:])  # the first one warms up
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", metavar="PYTHON", help="the interpreter of another installation of Coterie")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls, in a turn with --against")
    parser.add_argument("--turns", type=int, default=3, help="of each interpreter, with --against")
    parser.add_argument("--json", action="store_true", help="print the figures of one turn, without SDPA's")
    options = parser.parse_args()
    if options.json:
        print(json.dumps(measure(options.repeats, dense=False)))
        return
    print(f"{coterie.backends()['native']}, {torch.get_num_threads()} threads\n")
    here = measure(options.repeats, dense=True)
    print("| case | SDPA, ms | ours, ms | ratio |\n|---|---:|---:|---:|")
    for case in dict.fromkeys(name.split(" | ")[0] for name in here):
        sdpa, ours = here[f"{case} | sdpa"], here[f"{case} | ours"]
        print(f"| {case} | {sdpa:,.0f} | {ours:,.0f} | {sdpa / ours:.1f}× |")
    if options.against is None:
        return
    from benchmarks.builds import compared  # an older build that runs this file has no such module

    before, after = compared(options.against, __file__, ["--repeats", str(options.repeats)], options.turns)
    print("\n| case | there, ms | here, ms | here / there |\n|---|---:|---:|---:|")
    for name, taken in after.items():
        print(f"| {name.split(' | ')[0]} | {before[name]:,.0f} | {taken:,.0f} | {taken / before[name]:.2f} |")


if __name__ == "__main__":
    main()
