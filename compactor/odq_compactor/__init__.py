"""Retention: what is removed from a root, when, and what that frees.

Nothing is implemented here yet; the package holds its place in the layout.
"""
