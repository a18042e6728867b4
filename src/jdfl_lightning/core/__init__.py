"""Foundations: errors, named tensors, messages between server and client, seeds, safe files.

Nothing here imports from another package of this project.
"""
