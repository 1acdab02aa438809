"""One step of the engine: a token for every row in decode and one bounded chunk of prompts, in one call of the model.

mlx_engine.py  MlxEngine: rows come and go, `next` makes a step
packed.py      forward: rows in decode and chunks of prompts through the model together
decode.py      DecodeBatch: launch the next step, land the one in flight; inflight.py hands its tokens to rows
prefill.py     Prefill: one chunk; prefill_order.py picks its rows, pacing.py its size from the speed that step_clock.py
               measures
length_buckets.py  rows of about the same length decode together; padding.py counts the bytes of padding
width_costs.py  measures the cost of verify blocks when an engine starts
"""
