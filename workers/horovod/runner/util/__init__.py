"""The modules of `horovod.runner.common.util` that scripts and launchers use beside `horovod.run`."""
