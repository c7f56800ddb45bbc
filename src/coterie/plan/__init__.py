"""A plan: who meets whom. What mechanisms write and the engine executes."""

from coterie.plan.plan import Duplicates, Means, Plan, Round

__all__ = ["Duplicates", "Means", "Plan", "Round"]
