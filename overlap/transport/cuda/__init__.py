"""Sends tensors of a GPU between ranks: over NCCL, or through pinned memory."""
