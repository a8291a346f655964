"""The backend of `init_process_group("hubring")`: scripts on torch.distributed exchange through a hub."""
