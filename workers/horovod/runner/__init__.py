"""`horovod.run`: runs a function in several processes on this machine."""
