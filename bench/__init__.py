"""Benchmarks: the published workloads as data, a runner that measures device time, and a report.

The command line is `qla-bench` (or ``python -m bench`` from the root of the repository).
"""
