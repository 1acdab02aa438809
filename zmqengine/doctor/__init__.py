"""What is wrong with this machine, a model or a worker, one line a finding, before somebody has to ask."""
