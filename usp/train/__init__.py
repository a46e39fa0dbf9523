"""One training run: checks, the engine, the loop, and checkpoints to resume from. Each file imports only earlier ones:

engines, checkpoints, resume, claim, validate, resolve, step, evaluate, prepare, build, learning_rate, loop, trainer.
"""
