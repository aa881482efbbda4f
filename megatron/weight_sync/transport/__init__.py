"""Ways for payloads to travel: a torch.distributed group, a directory or object store, CUDA IPC."""
