"""One training run: checks, the engine, the loop, and checkpoints to resume from. Each file imports only earlier ones:

checkpoints, passes, engine, validate, resolve, step, build, loop, prepare, dry_run, summary, tuning, trainer.
"""
