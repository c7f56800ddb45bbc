"""Triton kernels of the engine, and what they read. Importing anything in here imports Triton."""
