"""One step of the engine: decode every row, then prefill one bounded chunk of a prompt.

mlx_engine.py  MlxEngine: rows come and go, `next` makes a step
decode.py      DecodeBatch: launch the next step, land the one in flight; inflight.py hands its tokens to rows
prefill.py     Prefill: one chunk; prefill_order.py picks its rows, pacing.py its size from the speed that step_clock.py
               measures
length_buckets.py  rows of about the same length decode together; padding.py counts the bytes of padding
width_costs.py  measures the cost of verify blocks when an engine starts
"""
