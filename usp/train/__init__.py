"""One training run: checks, the engine, the loop, and checkpoints to resume from. Each file imports only earlier ones:

resume, checkpoints, engines, validate, prepare, build, trainer.
"""
