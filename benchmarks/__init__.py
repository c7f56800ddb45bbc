"""Measurements that the README quotes, each printed by a command in the Makefile."""
