"""Budgets of a round chosen by what they cost: cost tables, recorded rounds, controllers, and the way back to 1."""
