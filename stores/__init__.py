"""``torch.distributed.Store`` implementations, one per backend."""
