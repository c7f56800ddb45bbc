"""Triton kernels of planning. Importing anything in here imports Triton."""
