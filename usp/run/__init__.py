"""Process lifecycle: launch, failures, signals, watchdog, profiling and metrics. Each file imports only earlier ones:

launch, metrics, profiling, stacks, signals, failures, watchdog.
"""
