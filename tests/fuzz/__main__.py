"""Fuzz the engine: `python -m tests.fuzz --seconds 10`, or `--count 1000000` for a night.

Each instruction set that runs here gets a process of its own, as it is chosen when the module is loaded; as many at a
time as there are cores. A mismatch, a crash or a hang ends the run with the seed that replays it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

KINDS = ("plans", "ops")
SETS = ("portable", "avx2", "avx512")
HANG = 120.0  # seconds for one case


def main() -> int:
    """Run, print what was found, and say whether all was well."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument(
        "--kind", choices=KINDS, help="plans against the oracle, or calls of the raw ops; both by default"
    )
    parser.add_argument("--isa", choices=SETS, help="one instruction set instead of all that run here")
    parser.add_argument("--seconds", type=float, help="stop after about so long (10 unless there is a count)")
    parser.add_argument("--count", type=int, help="stop after so many cases of each kind")
    parser.add_argument("--seed", type=int, default=0, help="of the first case; case i has seed + i")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.seconds is None and options.count is None:
        options.seconds = 10.0
    if options.worker:
        return _work(options)
    kinds = [options.kind] if options.kind else list(KINDS)
    sets = [options.isa] if options.isa else _runnable()
    jobs = [(kind, isa) for kind in kinds for isa in sets]
    with ThreadPoolExecutor(os.cpu_count()) as cores:
        return max(cores.map(lambda job: _supervise(job[0], job[1], options, jobs, sets), jobs))


def _runnable() -> list[str]:
    code = "from coterie import compiled; print(compiled.instruction_set())"
    best = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    return list(SETS[: SETS.index(best) + 1])


def _supervise(kind: str, isa: str, options: argparse.Namespace, jobs: list[tuple[str, str]], sets: list[str]) -> int:
    """One process, and what became of it."""
    at = sets.index(isa)
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz", "--kind", kind, "--isa", isa]
    seed = options.seed
    if options.count is not None:  # the cases are shared out: every set sees others
        share = [options.count * (i + 1) // len(sets) - options.count * i // len(sets) for i in range(len(sets))]
        command += ["--count", str(share[at])]
        seed += sum(share[:at])
    else:
        seed += at << 40
    if options.seconds is not None:
        command += ["--seconds", str(options.seconds * min(os.cpu_count() or 1, len(jobs)) / len(jobs))]
    env = {**os.environ, "COTERIE_ISA": isa, "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "seed"
        place.write_bytes(struct.pack("<q", seed))
        process = subprocess.Popen([*command, "--seed", str(seed), "--worker", str(place)], env=env)
        last, since = seed, time.monotonic()
        while process.poll() is None:
            time.sleep(0.05)
            now = struct.unpack("<q", place.read_bytes())[0]
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > HANG:
                process.send_signal(signal.SIGABRT)  # faulthandler says where it was
                print(f"{kind} on {isa}: hangs", flush=True)
                process.wait()
        last = struct.unpack("<q", place.read_bytes())[0]
    if process.returncode:
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit {process.returncode}"
        print(f"{kind} on {isa}: failed ({how})")
        print(f"replay: python -m tests.fuzz --kind {kind} --isa {isa} --seed {last} --count 1", flush=True)
        return 1
    return 0


def _work(options: argparse.Namespace) -> int:
    import torch

    from coterie import compiled
    from tests.fuzz import ops, plans

    torch.set_num_threads(1)
    if compiled.instruction_set() != options.isa:
        print(f"{options.isa} does not run here", file=sys.stderr)
        return 2
    plans.check(plans.draw(0), "auto")  # torch loads much of itself at the first call
    place = os.open(options.worker, os.O_WRONLY)
    start, done, accepted, errors = time.monotonic(), 0, 0, plans.Errors()
    while options.count is None or done < options.count:
        if options.seconds is not None and time.monotonic() - start > options.seconds:
            break
        seed = options.seed + done
        os.pwrite(place, struct.pack("<q", seed), 0)
        if options.kind == "ops":
            accepted += ops.check(seed)
        else:
            torch.set_num_threads(2 if seed % 16 == 0 else 1)  # two wait for each other longer than they work
            case = plans.draw(seed)
            exact = case.tensors[0].dtype == torch.float64  # which only the reference takes
            for backend in ("reference",) if exact else ("native", "reference") if seed % 32 == 0 else ("native",):
                errors = errors.worse(plans.check(case, backend))
        done += 1
    rate = done / max(1e-9, time.monotonic() - start)
    line = f"{options.kind} on {options.isa}: {done:,} cases, {rate:,.0f} a second"
    if options.kind == "ops":
        print(f"{line}; {accepted:,} accepted, {done - accepted:,} refused, none crashed", flush=True)
    else:
        worst = {name: f"{share:.1%}" for name, share in vars(errors).items()}
        tolerance = ", ".join(f"{name} {bound:g}" for name, bound in plans.TOLERANCE.items())
        print(f"{line}; worst errors as shares of what is tolerated: {json.dumps(worst)}", flush=True)
        print(f"  tolerated of |found − want| / (1 + |want|): {tolerance}; of gradients 3 times as much", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
