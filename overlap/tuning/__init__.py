"""Finds the settings of a strategy that make the user's own steps shortest, while they train."""
