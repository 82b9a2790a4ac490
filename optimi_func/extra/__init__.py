"""Averages, optimizers around another, and statistics, which nothing else imports."""
