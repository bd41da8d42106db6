"""What ranks send each other: tensors, objects, and questions; over comm_core, torch.distributed, or from a GPU."""
