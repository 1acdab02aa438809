"""Pico in the shape of Qwen3.5, with a head that was trained to draft for it.

`model.py` puts the bundled pico's weights into that shape; `train.py` trained the head, `mtp.safetensors`, on what pico
writes.
"""

from pathlib import Path

HEAD_FILE = Path(__file__).parent / "mtp.safetensors"
"""The trained head, by the names that published ones have."""
