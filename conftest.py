"""Modules of kernels are collected, for their doctests, only where Triton can be imported."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("triton") else ["src/coterie/*/kernels/*.py"]
