"""One step of the engine: a token or a verify block of every row in decode, and slices of prompts, in one forward pass.

mlx_engine.py     MlxEngine: rows come and go; `next` plans a step, builds, launches and lands it
step.py           Step: all that is valid from a launch to the landing
chunk.py          share_out: how many tokens of each prompt the next step computes
prefill_order.py  pick: which prompts compute now
pacing.py         the budget of a step, from the speed that step_clock.py measures
texts.py          rows of texts to embed
width_costs.py    measures the cost of verify blocks when an engine starts
"""
