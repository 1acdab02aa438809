"""Kernel variants, measured at load on this device; the fastest correct one is used."""
