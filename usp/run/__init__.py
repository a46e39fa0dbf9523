"""Process lifecycle: launch, failures, signals, watchdog, profiling and metrics. Each file imports only earlier ones:

launch, output, tables, failures, metrics, watchdog.
"""
