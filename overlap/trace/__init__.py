"""Timelines, and pictures of them."""
