"""Sends tensors, objects and questions between ranks: over comm_core, torch.distributed, or from a GPU."""
