"""Kept reports, and measurements that only the project itself needs: `python -m benchmarks.NAME`."""
