"""Kernels in the Metal Shading Language, which MLX compiles when they are first used.

They have not run on a Mac yet: `--kernels metal` takes them, after a comparison with MLX's operations at the start.
`mx.fast.metal_kernel` gives inputs as `const device`, so a kernel of it cannot write keys and values into slots: that
stays MLX's indexed assignment, which writes in place.

slot_attention.metal   attention of tokens in decode and of verify blocks, over the slots of all pools of a step
slot_attention.py      its inputs; prompts attend by MLX's fused attention
metal_ops.py           the operations of a decoder layer with that attention
"""
