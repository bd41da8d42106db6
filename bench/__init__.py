"""Benchmarks, and the emulated cluster they run on."""
