"""Checks that a user runs on a new machine: is the result right, did ranks talk, what is here.

Behind `python -m megatron_splitkv.verify` and `python -m megatron_splitkv.doctor`.
"""
