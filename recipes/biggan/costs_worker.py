"""The process in which one measurement of `costs.py` is taken: its arguments come as JSON, and so does the result."""

from __future__ import annotations

import json
import sys

import torch

from recipes.biggan.costs import measure

if __name__ == "__main__":
    threads, *arguments = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    print(json.dumps(measure(*arguments)))
