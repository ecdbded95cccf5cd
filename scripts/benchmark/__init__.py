"""Benchmarks of this project and of other systems on one machine: see docs/performance.md."""
