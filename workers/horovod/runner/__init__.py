"""`horovod.run`: a function on several processes of this machine."""
