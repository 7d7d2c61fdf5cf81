"""Benchmarks: the published workloads as data, beside other libraries and between versions, and reports.

The command line is `qla-bench` (or ``python -m qla.bench``; ``python -m bench`` from the root of the repository).
"""
