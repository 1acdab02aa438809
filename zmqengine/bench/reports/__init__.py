"""Reports: facts, figures over rounds, tables, plots and comparisons."""
