"""Simulates schedules on one computing thread and one wire. Pure."""
