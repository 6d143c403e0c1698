"""Foundations: versions of JAX, settings, errors, interning, versions of objects, static keys, text."""
