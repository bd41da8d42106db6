"""Adapters that let other libraries' trainers train with dear.

Each module imports its library; dear itself imports none of them.
"""
