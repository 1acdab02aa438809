"""LoRA adapters: rows of one step may each have another one.

lora_files.py     the arrays in files of mlx-lm and PEFT
projections.py    the products of a layer that they change, by name
lora_deltas.py    what they add to the products of a step
loaded.py         those that rows may have now

An adapter adds to a product with weights W the product of two narrow ones, x A B. Those of all adapters are stacked,
and a token looks up its own; one without an adapter looks up zeros. Where no row of a step has one, no product is
added, and the step is the same as without any adapter, traces included.
"""
