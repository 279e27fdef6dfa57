"""Every figure of a GPU with one command: stages, each in a process of its own."""
