"""Diagnosis of this machine, a model and a worker, one line for each finding."""
