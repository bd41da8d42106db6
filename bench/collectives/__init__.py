"""Every collective of our communicators beside torch.distributed's, over gloo."""
