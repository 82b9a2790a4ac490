"""Averages, optimizers around another, and statistics.

Nothing in the package imports these rooms.
"""
