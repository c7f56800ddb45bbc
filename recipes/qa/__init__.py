"""Extractive question answering in SQuAD's format (clustered attention, §4.3)."""
