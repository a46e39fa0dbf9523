"""Process lifecycle: launch, failures, signals, watchdog, profiling and metrics. Each file imports only earlier ones:

launch, orphans, output, lock, metrics, profiling, stacks, signals, failures, user_code, watchdog.
"""
