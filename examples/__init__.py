"""Programs that show how the toolkit is used, each started by the command in its docstring."""
