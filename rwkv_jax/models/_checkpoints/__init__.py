"""Checkpoints: files of named tensors, and the parameter trees and states that they hold.

Nothing in a file is trusted. Tensors are views of the mapped file whose bounds have been checked,
and no code in a file is run. A file that is not what it should be is a `ValueError`.
"""
